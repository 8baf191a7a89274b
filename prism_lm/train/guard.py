"""Everything that stands around a run from its start to its end: the hold on its folder, the ranks' signs of life, and
the watchdog."""

import json
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch._C._distributed_c10d import Store

from prism_lm.checkpoint.ownership import Owner, claim
from prism_lm.parallel.collectives import RunFailed, describe_error, is_lost_process, naming_missing
from prism_lm.parallel.mesh import Ranks
from prism_lm.parallel.presence import INTERVAL_S, Presence
from prism_lm.parallel.store import open_store
from prism_lm.train.stop_signal import StopSignal
from prism_lm.train.watchdog import Limits, Watchdog

_CLAIM, _CLAIM_READ = "claim", "claim_read"
_MISSING_S = 8.0
_READ_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What a run's loop tells, and asks, while it goes on."""

    owner: Owner
    "`owner.check()` before anything is published, removed or written that another start may own by now."
    watchdog: Watchdog
    "`watchdog.beat(phase)` as each phase begins, `watchdog.finish()` once the run's last checkpoint is saved."


@contextmanager
def guarding(
    run_dir: Path,
    ranks: Ranks,
    stop: StopSignal,
    *,
    limits: Limits,
    on_end: Callable[[str], None],
    interval_s: float = INTERVAL_S,
) -> Generator[Guard, None, None]:
    """Claims the folder and watches over the run for the time of the block, which holds the process group.

    Every rank enters it, in StopSignal's block and before any process group starts. Raises ValueError, on every rank,
    where another start uses the folder; RunFailed, naming the missing ranks, where the block raises because others are
    gone. `on_end` writes the ending of a run that the watchdog ends down; see Watchdog.
    """
    store = open_store(ranks, purpose="presence") if ranks.world_size > 1 else None
    owner = claim_together(run_dir, ranks, store)
    presence = Presence(ranks, store, interval_s=interval_s)
    watchdog = Watchdog(run_dir, presence, stop, limits, on_end)
    try:
        with presence.showing(), naming_missing(lambda: presence.find_missing(_MISSING_S)), watchdog.watching():
            try:
                yield Guard(owner=owner, watchdog=watchdog)
            except Exception as error:
                if is_lost_process(error):
                    raise RunFailed(describe_error(error)) from error
                raise
    finally:
        if ranks.is_main:
            owner.release()


def claim_together(run_dir: Path, ranks: Ranks, store: Store | None) -> Owner:
    """Rank 0's claim, held by every rank; its refusal is raised on all of them."""
    if store is None:
        return _claim(run_dir)
    if not ranks.is_main:
        return _read_claim(run_dir, store)
    try:
        owner = _claim(run_dir)
    except (ValueError, RunFailed) as error:
        store.set(_CLAIM, json.dumps({"refusal": str(error), "is_typed": isinstance(error, ValueError)}))
        _wait_for_readers(ranks, store)
        raise
    store.set(_CLAIM, json.dumps({"token": owner.token}))
    return owner


def _claim(run_dir: Path) -> Owner:
    try:
        return claim(run_dir)
    except OSError as error:
        raise RunFailed(describe_error(error)) from error


def _read_claim(run_dir: Path, store: Store) -> Owner:
    try:
        answer = cast(dict[str, str], json.loads(store.get(_CLAIM)))
        store.add(_CLAIM_READ, 1)
    except RuntimeError as error:
        raise RunFailed(f"rank 0 ended before it held run_dir={run_dir}; its own output says why") from error
    if "token" in answer:
        return Owner(run_dir, answer["token"])
    raise ValueError(answer["refusal"]) if answer["is_typed"] else RunFailed(answer["refusal"])


def _wait_for_readers(ranks: Ranks, store: Store) -> None:
    """Rank 0 may serve the store: it stays until the others know why the run does not start."""
    end_s = time.monotonic() + _READ_S
    while store.add(_CLAIM_READ, 0) < ranks.world_size - 1 and time.monotonic() < end_s:
        time.sleep(0.05)
