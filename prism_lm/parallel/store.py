"""The key-value store through which processes find one another, at MASTER_ADDR and MASTER_PORT.

torchrun's agent serves it, otherwise rank 0. A process connects once for each purpose and keeps the connection to its
end, so that the next group of the same processes never meets a server that is about to close.
"""

import os
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

from prism_lm.parallel.mesh import Ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

CONNECT_S = 600.0
_connections: dict[tuple[str, ...], "TCPStore"] = {}
_openings: Counter[tuple[str, ...]] = Counter()


def open_store(ranks: Ranks, *, purpose: str) -> "Store":
    """A part of the store that nothing was written to before, over this process's connection for that purpose. Every
    process of the run calls it, for one purpose equally often. Raises ValueError where the address is not set."""
    from torch._C._distributed_c10d import PrefixStore

    connection = _name_connection(ranks, purpose)
    if connection not in _connections:
        _connections[connection] = _connect(ranks)
    _openings[connection] += 1
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"prism/{purpose}/{restarts}/{_openings[connection]}", _connections[connection])


def _name_connection(ranks: Ranks, purpose: str) -> tuple[str, ...]:
    """One for each process that was forked, too."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ValueError(f"{name} must be set for world_size={ranks.world_size} processes; start with torchrun")
    address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    return (purpose, *address, str(os.getpid()), str(ranks.rank), str(ranks.world_size))


def _connect(ranks: Ranks) -> "TCPStore":
    """At rank 0 this starts the server, unless one of this process listens there already."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=ranks.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        timeout=timedelta(seconds=CONNECT_S),
        wait_for_workers=False,
        multi_tenant=True,
    )
