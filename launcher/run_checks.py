"""What can be found wrong with a run on a login node: without a GPU or a process group, and leaving no file behind."""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from launcher.config import RunConfig
from launcher.environment import ProcessEnvironment
from launcher.job_request import Request
from launcher.run_folder import find_existing, spell_bytes
from prism_lm.checkpoint.folder import list_published
from prism_lm.model.cost import checkpoint_bytes


def check_run(config: RunConfig, request: Request) -> str | None:
    """Everything that the trainer's ranks would check before and when they start: settings for this number of ranks,
    data, tokenizer, the newest checkpoint that it would go on from. Raises ValueError or DataError. Returns a warning
    for a run that has nothing left to do.

    What belongs to the nodes rather than to the run, such as their CPU cores and caches, is not looked at.
    """
    from launcher.train import build_run
    from prism_lm.model.kernels import choose_kernels
    from prism_lm.train.session import choose_start

    choose_kernels(config.parallel.kernels, "cuda" if request.gpus_per_node else "cpu")
    with _place_of_rank_0(request) as environment, _temporary_cache(config) as here:
        step = choose_start(build_run(here, environment)).state.step
    if step >= config.train.steps:
        return (
            f"run_dir={config.run_dir} has its train.steps={config.train.steps} done; a larger train.steps extends it"
        )
    return None


@contextmanager
def _place_of_rank_0(request: Request) -> Generator[ProcessEnvironment, None, None]:
    """Rank 0's variables, and those that the loader and the trainer read: this machine's GPUs do not count."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(request.num_ranks)}
    read = {"LOCAL_WORLD_SIZE": str(request.ranks_per_node), "PRISM_GPU_BOUND": "1"}
    before = {name: os.environ.get(name) for name in read}
    os.environ.update(read)
    try:
        yield ProcessEnvironment(launcher="srun" if request.num_ranks > 1 else "single", variables=variables)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


@contextmanager
def _temporary_cache(config: RunConfig) -> Generator[RunConfig, None, None]:
    """The run as a login node can look at it: a cache that is removed again, on the run folder's disk where the nodes'
    lies there too; kernels, loader processes and hashes as suit this machine."""
    parent = None if config.data.cache_dir else find_existing(Path(config.run_dir))
    with tempfile.TemporaryDirectory(prefix=".prism-check-", dir=parent) as folder:
        data = replace(config.data, cache_dir=folder, workers=-1, verify="sizes")
        yield replace(config, data=data, parallel=replace(config.parallel, kernels="plain"))


def check_folder_can_be_made(run_dir: Path) -> None:
    """Raises ValueError where the run's folder, and the folder of its logs, cannot be written."""
    for folder in (run_dir, run_dir / "slurm"):
        found = find_existing(folder)
        if not found.is_dir() or not os.access(found, os.W_OK | os.X_OK):
            kind = "a folder that you may write to" if found.is_dir() else "a folder and not a file"
            raise ValueError(f"run_dir={run_dir} must be writable, and so {found} must be {kind}; use another run_dir")


def check_room(config: RunConfig) -> str | None:
    """Raises ValueError where the disk has no room for the checkpoints that the run holds at one time, the one being
    written included. Returns a warning where those kept for good will not fit."""
    run_dir, keep = Path(config.run_dir), config.train.checkpoint
    each = checkpoint_bytes(config.model, precision=config.train.precision)
    saves = 1 + (config.train.steps - 1) // keep.save_every_steps if keep.save_every_steps else 1
    held = len(list_published(run_dir))
    missing = max(1, min(saves, keep.keep_last + 1) - held)
    free = shutil.disk_usage(find_existing(run_dir)).free
    sizes = f"{spell_bytes(each)} each, {spell_bytes(free)} free"
    if free < missing * each:
        raise ValueError(
            f"run_dir={run_dir} must have room for {missing} checkpoints ({sizes}); remove older ones ("
            "prism checkpoint prune), lower train.checkpoint.keep_last, or use a run_dir on another disk"
        )
    for_good = config.train.steps // keep.keep_every_steps if keep.keep_every_steps else 0
    if free < (missing + min(for_good, saves)) * each:
        return (
            f"train.checkpoint.keep_every_steps={keep.keep_every_steps} keeps up to {min(for_good, saves)} checkpoints "
            f"for good, more than run_dir={run_dir} has room for ({sizes})"
        )
    return None
