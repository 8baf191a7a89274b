"""The key-value store through which processes find one another, at MASTER_ADDR and MASTER_PORT.

torchrun's agent serves it, otherwise rank 0. A process connects once for each purpose and keeps the connection to its
end, so that the next group of the same processes never meets a server that is about to close.
"""

import os
import threading
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

from prism_lm.parallel.mesh import Ranks
from prism_lm.parallel.rendezvous import explain_unreachable, meet, name_meeting, read_limit_s

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

# A rank may wait this long for what another one writes.
ANSWER_S = 600.0
_SLACK_S = 2.0
_connections: dict[tuple[str, ...], "TCPStore"] = {}
_openings: Counter[tuple[str, ...]] = Counter()


def open_store(ranks: Ranks, *, purpose: str) -> "Store":
    """A part of the store that nothing was written to before, over this process's connection for that purpose. Every
    process of the run calls it, for one purpose equally often. The first call returns once all of them have come.

    Raises ValueError where the address is not set, Unmet where processes are missing after PRISM_RENDEZVOUS_S.
    """
    from torch._C._distributed_c10d import PrefixStore

    connection = _name_connection(ranks, purpose)
    if connection not in _connections:
        limit_s = read_limit_s()
        opened = _connect(ranks, limit_s)
        if not any(known[1:] == connection[1:] for known in _connections):
            meet(ranks, PrefixStore(name_meeting(), opened), limit_s)
        _connections[connection] = opened
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


def _connect(ranks: Ranks, limit_s: float) -> "TCPStore":
    """At rank 0 this starts the server, unless one of this process listens there already."""
    opened: list[TCPStore | RuntimeError] = []

    def open_it() -> None:
        try:
            opened.append(_open(ranks, limit_s))
        except RuntimeError as error:
            opened.append(error)

    # In a thread: a listener that is no store, and says nothing, would be waited for without end.
    thread = threading.Thread(target=open_it, name="connect", daemon=True)
    thread.start()
    thread.join(limit_s + _SLACK_S)
    if not opened:
        raise explain_unreachable(ranks, TimeoutError("no answer"), limit_s)
    if isinstance(opened[0], RuntimeError):
        raise explain_unreachable(ranks, opened[0], limit_s) from opened[0]
    return opened[0]


def _open(ranks: Ranks, limit_s: float) -> "TCPStore":
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=ranks.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        timeout=timedelta(seconds=limit_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
    store.set_timeout(timedelta(seconds=ANSWER_S))
    return store
