"""Where there is no GPU, Triton interprets kernels on the CPU; it reads this as a kernel's module is imported.

Also which tests of `make test` share a process and which come first.
"""

import gc
import os
from typing import Any

import pytest
import torch


def _patch_language_once() -> None:
    """Triton's interpreter puts its functions into triton.language at a launch, and once more at every call of a device
    function within it: a quarter of the time of these tests. Here they stay in the part that no launch sees to."""
    from triton.language import standard
    from triton.runtime import interpreter

    interpreter._patch_lang(standard.sum.fn)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _patch_language_once()


# These take longest, so they begin first: no process is left with one of them when the others have ended.
DEAR = (
    "tests/prism_lm/train/test_engine.py",
    "tests/prism_lm/train/test_resume.py",
    "tests/data_pipeline/test_failures_in_training.py",
    "tests/prism_lm/train/test_loop.py",
    "tests/soak/test_kills.py",
    "tests/prism_lm/train/test_straggler.py",
    "tests/prism_lm/train/test_watchdog.py",
    "tests/prism_lm/train/test_session.py",
    "tests/prism_lm/train/test_sequence.py",
)
# Tests that build nothing for one another go one by one to whichever process has nothing left to do, at the end.
SINGLE = ("tests/prism_lm/model/", "tests/kernels/")
# These share what takes long to start.
TOGETHER = "tests/slurm/"


def find_group(nodeid: str) -> str:
    """What a test shares a process with: its folder, its file, or nothing."""
    path = nodeid.partition("::")[0]
    if path.startswith(TOGETHER):
        return TOGETHER
    return nodeid if path.startswith(SINGLE) else path


def rank_group(nodeid: str) -> int:
    """Smaller begins earlier."""
    for prefixes, first in ((DEAR, 0), (SINGLE, len(DEAR) + 1)):
        found = [first + place for place, prefix in enumerate(prefixes) if nodeid.startswith(prefix)]
        if found:
            return found[0]
    return len(DEAR)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank_group(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups to processes, in the order of collection (with --no-loadscope-reorder)."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return find_group(nodeid)

    return GroupScheduling(config, log)


def pytest_collection_finish() -> None:
    """What is imported stays to the end: the garbage collector need not go through it again and again."""
    gc.collect()
    gc.freeze()
