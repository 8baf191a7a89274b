"""What one process holds while a run goes on, and how it is opened: fresh, or from a checkpoint."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from prism_lm.checkpoint.load import check_fits, newest_checkpoint, read_trainer
from prism_lm.checkpoint.manager import CheckpointManager
from prism_lm.parallel.collectives import RunFailed, call_together, gather_objects, iterate_together
from prism_lm.parallel.mesh import check_devices
from prism_lm.train.config import check_parallel, compute_accumulation_steps
from prism_lm.train.engine import Engine, build_engine, end_process_group
from prism_lm.train.metrics import Meter, find_peak_flops
from prism_lm.train.state import (
    Loader,
    TrainRun,
    TrainState,
    capture_rank_state,
    restore_rank_state,
    seed_generators,
)
from prism_lm.train.step import TrainBatch
from prism_lm.train.stop_signal import StopSignal
from prism_lm.train.tensorboard import Recorder

ENGINE_LOG_NAME = "deepspeed.log"


@dataclass(kw_only=True)
class Session:
    """What one process holds while a run goes on."""

    run: TrainRun
    state: TrainState
    engine: Engine
    loader: Loader
    validation_loader: Loader | None
    micro_batches: Iterator[TrainBatch]
    manager: CheckpointManager
    meter: Meter
    recorder: Recorder
    stop: StopSignal
    validation_batches: list[TrainBatch] = field(default_factory=list[TrainBatch])
    "This rank's validation rows where train.eval_rows limits them, read once and evaluated each time."
    figures: dict[str, float] = field(default_factory=dict[str, float])
    "What the current step has to record."
    histograms: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    "The same, of histograms."

    @property
    def accumulation_steps(self) -> int:
        return compute_accumulation_steps(self.run.train, self.run.ranks)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins."""

    state: TrainState
    folder: Path | None
    "The checkpoint to resume from; None for a fresh run."


def choose_start(run: TrainRun) -> Start:
    """Checks the run's settings and finds its newest checkpoint. Raises ValueError for what cannot run.

    Needs no process group; every rank comes to the same result.
    """
    compute_accumulation_steps(run.train, run.ranks)
    check_parallel(run.train, run.parallel, run.ranks)
    check_devices(run.ranks)
    if run.train.eval_every_steps and run.build_validation_loader is None:
        raise ValueError(
            f"train.eval_every_steps={run.train.eval_every_steps} must be 0 without validation data; "
            "use train.eval_every_steps=0"
        )
    folder = newest_checkpoint(run.run_dir)
    if folder is None:
        return Start(state=TrainState(), folder=None)
    trainer = read_trainer(folder)
    check_fits(folder, trainer, run.list_fixed())
    return Start(state=TrainState.from_trainer(trainer), folder=folder)


def open_session(run: TrainRun, start: Start, stop: StopSignal, stack: ExitStack) -> Session:
    """Builds model, engine and loaders and restores the checkpoint. What does not fit is refused here at the latest,
    and the run's records stay as they are.

    The process group must be up. What it opens is closed with `stack`.
    """
    agree_on_start(run, start)
    manager = CheckpointManager(run.run_dir, run.train.checkpoint, run.ranks)
    if start.folder is not None:
        manager.verify(start.folder)
    loader = call_together(run.build_train_loader)
    validation_loader = _open_validation(run)
    engine = _build_engine(run)
    stack.callback(end_process_group)
    stack.callback(engine.close)
    if start.folder is not None:
        _restore(run, start.folder, engine, loader)
    return Session(
        run=run,
        state=start.state,
        engine=engine,
        loader=loader,
        validation_loader=validation_loader,
        micro_batches=call_together(lambda: iter(loader)),
        manager=manager,
        meter=_build_meter(run, engine),
        recorder=_build_recorder(run, start),
        stop=stop,
    )


def agree_on_start(run: TrainRun, start: Start) -> None:
    """Raises RunFailed, on all ranks, where they found different checkpoints."""
    found = gather_objects("none" if start.folder is None else start.folder.name)
    rank = next((rank for rank, name in enumerate(found) if name != found[0]), None)
    if rank is not None:
        raise RunFailed(
            f"run_dir={run.run_dir} must hold the same checkpoints for every rank, but the newest is {found[0]} for "
            f"rank 0 and {found[rank]} for rank {rank}; use a run_dir on a file system that all hosts share"
        )


def _open_validation(run: TrainRun) -> Loader | None:
    if run.build_validation_loader is None or not run.train.eval_every_steps:
        return None
    return call_together(run.build_validation_loader)


def _build_engine(run: TrainRun) -> Engine:
    seed_generators(run.seed)
    model = run.build_model()
    engine = build_engine(model, run.train, run.parallel, run.ranks, run.run_dir / ENGINE_LOG_NAME)
    seed_generators(run.seed + 1 + run.ranks.rank)
    return engine


def _restore(run: TrainRun, folder: Path, engine: Engine, loader: Loader) -> None:
    call_together(lambda: engine.load(folder))
    call_together(lambda: restore_rank_state(folder, run.ranks.rank, loader))


def _build_recorder(run: TrainRun, start: Start) -> Recorder:
    return Recorder(run.run_dir, resumed_step=start.state.step, total_steps=run.train.steps, enabled=run.ranks.is_main)


def _build_meter(run: TrainRun, engine: Engine) -> Meter:
    peak_flops = find_peak_flops(engine.device, run.train.precision)
    return Meter(
        total_steps=run.train.steps,
        flops_per_token=run.flops_per_token,
        peak_flops=None if peak_flops is None else peak_flops * run.ranks.world_size,
    )


def save_session(session: Session) -> None:
    """Saves this step, unless it is saved already."""
    session.manager.save(
        session.state.step,
        engine=session.engine,
        trainer=session.state.describe(session.run),
        rank_state=capture_rank_state(session.loader),
    )


def open_validation_pass(session: Session) -> Iterator[TrainBatch]:
    """This rank's validation micro-batches: the first train.eval_rows rows over all ranks, kept from the first pass on;
    with 0 all rows, read anew each pass and never held together. Errors are raised on all ranks."""
    train = session.run.train
    if not train.eval_rows:
        return _read_validation(session)
    if not session.validation_batches:
        limit = -(-train.eval_rows // (train.micro_batch_rows * session.run.ranks.data_world_size))
        session.validation_batches = list(islice(_read_validation(session), limit))
    return iter(session.validation_batches)


def _read_validation(session: Session) -> Iterator[TrainBatch]:
    assert session.validation_loader is not None
    is_empty = True
    for batch in iterate_together(session.validation_loader, name="the validation loader"):
        is_empty = False
        yield batch
    if is_empty:
        raise RunFailed("the validation loader has no rows; set train.eval_every_steps=0 or prepare more data")
