"""How the processes of a run find that all of them have come, before any of them waits in a collective.

Every rank registers at the run's store with the name of its node. Rank 0 waits for all, a stated time, and leaves one
verdict for all: go on, or end with a text that names the nodes and ranks that did not come. Where rank 0 itself does
not come, those that wait for it say so themselves.
"""

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from prism_lm.parallel.collectives import RunFailed
from prism_lm.parallel.mesh import Ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

DEFAULT_LIMIT_S = 300.0
# What an answer may take beyond the limit: rank 0's limit began when it came, not when others did.
_ANSWER_S = 15.0
_CAME, _VERDICT, _READ, _REFUSAL, _SPEAKER = "came", "verdict", "read", "refusal", "speaker"


class Unmet(RunFailed):
    """The ranks did not all come. `is_said_here`: this rank prints the text, which otherwise rank 0 does."""

    def __init__(self, text: str, *, is_said_here: bool = False) -> None:
        super().__init__(text)
        self.is_said_here = is_said_here


def read_limit_s() -> float:
    """PRISM_RENDEZVOUS_S, 300 where it is not set. Raises ValueError for what is no positive number."""
    text = os.environ.get("PRISM_RENDEZVOUS_S") or str(DEFAULT_LIMIT_S)
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < float("inf"):
        raise ValueError(f"PRISM_RENDEZVOUS_S={text} must be a positive number of seconds; unset it for 300")
    return limit_s


def name_node() -> str:
    """This node as SLURM calls it, or its host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def name_meeting() -> str:
    """Where in a store the ranks of this run meet: jobs that share a port by chance do not meet one another."""
    parts = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return "prism/meeting/" + "/".join(os.environ.get(part) or "0" for part in parts)


def explain_unreachable(ranks: Ranks, error: Exception, limit_s: float) -> Unmet:
    """The failure of a rank that could not open the store."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    reason = str(error)
    if "EADDRINUSE" in reason or "address already in use" in reason.lower():
        return Unmet(
            f"MASTER_PORT={port} must be free on {name_node()}, where rank 0 listens, but another process holds it; "
            "end that process, or export another MASTER_PORT",
            is_said_here=True,
        )
    return Unmet(
        f"MASTER_ADDR={address} MASTER_PORT={port} must be reached by rank {ranks.rank} on {name_node()} within "
        f"PRISM_RENDEZVOUS_S={limit_s:g}, but nothing answers there; look for rank 0's own error in the log, and "
        f"whether {address} is up and lets port {port} through",
        is_said_here=True,
    )


def meet(ranks: Ranks, store: "Store", limit_s: float) -> None:
    """Returns once every rank has come. Raises Unmet on every rank that has come when, limit_s after rank 0 came, some
    are missing, or the ranks do not agree on their number; after limit_s without rank 0; where rank 0 is lost."""
    try:
        if ranks.is_main:
            _lead(ranks, store, limit_s)
        else:
            _follow(ranks, store, limit_s)
    except Unmet:
        raise
    except RuntimeError as error:
        text = f"rank {ranks.rank} on {name_node()} lost rank 0 while the ranks met; rank 0's own error in the log"
        raise Unmet(f"{text} says why", is_said_here=True) from error


def _name(rank: int) -> str:
    return f"rank/{rank}"


def _lead(ranks: Ranks, store: "Store", limit_s: float) -> None:
    names = [_name(rank) for rank in range(ranks.world_size)]
    store.set(_name(0), json.dumps({"node": name_node(), "world_size": ranks.world_size}))
    have_all_come = _wait_until(lambda: store.check(names) or store.check([_REFUSAL]), limit_s)
    refusal = "" if have_all_come else _explain_missing(ranks, store, limit_s)
    if store.check([_REFUSAL]):
        refusal = store.get(_REFUSAL).decode()
    store.set(_VERDICT, json.dumps(refusal))
    # Rank 0 may serve the store, and may end soon: the others must have read the verdict by then.
    _wait_until(lambda: store.add(_READ, 0) >= store.add(_CAME, 0), _ANSWER_S / 3)
    if refusal:
        raise Unmet(refusal)


def _follow(ranks: Ranks, store: "Store", limit_s: float) -> None:
    """A rank that does not count the ranks as rank 0 does refuses to go on; it is not counted among those that came."""
    if not _wait_until(lambda: store.check([_name(0)]), limit_s):
        raise _explain_no_leader(ranks, store, limit_s)
    store.add(_CAME, 1)
    leader = cast(dict[str, str | int], json.loads(store.get(_name(0))))
    if leader["world_size"] == ranks.world_size:
        store.set(_name(ranks.rank), json.dumps({"node": name_node()}))
    else:
        rule = f"must be WORLD_SIZE={leader['world_size']} as on {leader['node']}"
        remedy = "start the same number of ranks on every node"
        store.set(_REFUSAL, f"WORLD_SIZE={ranks.world_size} on {name_node()} {rule}; {remedy}")
    if not _wait_until(lambda: store.check([_VERDICT]), limit_s + _ANSWER_S):
        text = f"rank 0 must answer rank {ranks.rank} on {name_node()} within PRISM_RENDEZVOUS_S={limit_s:g}"
        raise Unmet(f"{text} but did not; look whether it hangs", is_said_here=True)
    refusal = cast(str, json.loads(store.get(_VERDICT)))
    store.add(_READ, 1)
    if refusal:
        raise Unmet(refusal)


def _explain_no_leader(ranks: Ranks, store: "Store", limit_s: float) -> Unmet:
    """One of those that wait for rank 0 speaks for all."""
    text = f"rank 0 must come to {_spell_address()} within PRISM_RENDEZVOUS_S={limit_s:g} but did not"
    remedy = "look for its own error in the log, and whether another run holds that port"
    speaker = store.compare_set(_SPEAKER, "", str(ranks.rank)).decode()
    return Unmet(f"{text}; {remedy}", is_said_here=speaker == str(ranks.rank))


def _wait_until(is_true: Callable[[], bool], wait_s: float) -> bool:
    """Asks the store again and again, seldom after a while; signals are handled in between."""
    began_s, pause_s = time.monotonic(), 0.01
    while not is_true():
        left_s = wait_s - (time.monotonic() - began_s)
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(1.5 * pause_s, 0.2)
    return True


def _spell_address() -> str:
    return f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"


def _explain_missing(ranks: Ranks, store: "Store", limit_s: float) -> str:
    present = {rank for rank in range(ranks.world_size) if store.check([_name(rank)])}
    missing = [rank for rank in range(ranks.world_size) if rank not in present]
    came = Counter(cast(str, json.loads(store.get(_name(rank)))["node"]) for rank in present)
    nodes = describe_missing_nodes(os.environ.get("PRISM_NODES", ""), came)
    named = ", ".join([*nodes, f"rank{'s'[: len(missing) > 1]} {spell_ranges(missing)}"])
    return (
        f"WORLD_SIZE={ranks.world_size} ranks must meet at {_spell_address()} within PRISM_RENDEZVOUS_S={limit_s:g} "
        f"but {len(missing)} did not come: {named}; look for their errors in the log and at `sinfo -N -l`, or leave a "
        "bad node out with sbatch --exclude"
    )


def describe_missing_nodes(expected: str, present: Counter[str]) -> list[str]:
    """`node8 (1 of 2 ranks came)` for each node of `node7:2,node8:2` with fewer ranks than that."""
    pairs = [item.rpartition(":") for item in expected.split(",") if item]
    return [
        f"{node} ({present[node]} of {number} ranks came)" for node, _, number in pairs if present[node] < int(number)
    ]


def spell_ranges(numbers: list[int]) -> str:
    """`0, 3-7` for ascending numbers."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
