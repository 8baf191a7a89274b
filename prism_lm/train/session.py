"""What one process holds while a run goes on, and how it is opened: fresh, or from a checkpoint."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from prism_lm.checkpoint.load import check_fits, newest_checkpoint, read_trainer
from prism_lm.checkpoint.manager import CheckpointManager
from prism_lm.parallel.collectives import RunFailed, raise_together, sum_integers, wait_for_all
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

T = TypeVar("T")
ENGINE_LOG_NAME = "deepspeed.log"


@dataclass(kw_only=True)
class Session:
    """What one process holds while a run goes on."""

    run: TrainRun
    state: TrainState
    engine: Engine
    loader: Loader
    micro_batches: Iterator[TrainBatch]
    manager: CheckpointManager
    meter: Meter
    recorder: Recorder
    stop: StopSignal
    validation_batches: list[TrainBatch] = field(default_factory=list[TrainBatch])
    "This rank's validation rows, read once; the same ones are evaluated each time."
    figures: dict[str, float] = field(default_factory=dict[str, float])
    "What the current step has to record."
    histograms: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    "The same, of histograms."

    @property
    def accumulation_steps(self) -> int:
        return compute_accumulation_steps(self.run.train, world_size=self.run.ranks.world_size)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins."""

    state: TrainState
    folder: Path | None
    "The checkpoint to resume from; None for a fresh run."


def choose_start(run: TrainRun) -> Start:
    """Checks the run's settings and finds its newest complete checkpoint. Raises ValueError for what cannot run.

    Needs no process group; every rank comes to the same result.
    """
    compute_accumulation_steps(run.train, world_size=run.ranks.world_size)
    check_parallel(run.train, run.parallel)
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
    """Builds model, engine and loaders, restores the checkpoint, and opens the records. The process group must be up.

    What it opens is closed with `stack`.
    """
    manager = CheckpointManager(run.run_dir, run.train.checkpoint, run.ranks)
    manager.clean()
    if start.folder is not None:
        manager.verify(start.folder)
    engine = _build_engine(run)
    stack.callback(end_process_group)
    stack.callback(engine.close)
    loader = build_together(run.build_train_loader)
    if start.folder is not None:
        _restore(run, start.folder, engine, loader)
    recorder = _open_recorder(run, start)
    stack.callback(recorder.close)
    return Session(
        run=run,
        state=start.state,
        engine=engine,
        loader=loader,
        micro_batches=build_together(lambda: iter(loader)),
        manager=manager,
        meter=_build_meter(run, engine),
        recorder=recorder,
        stop=stop,
    )


def _build_engine(run: TrainRun) -> Engine:
    seed_generators(run.seed)
    model = run.build_model()
    engine = build_engine(model, run.train, run.parallel, run.ranks, run.run_dir / ENGINE_LOG_NAME)
    seed_generators(run.seed + 1 + run.ranks.rank)
    return engine


def _restore(run: TrainRun, folder: Path, engine: Engine, loader: Loader) -> None:
    engine.load(folder)
    build_together(lambda: restore_rank_state(folder, run.ranks.rank, loader))


def _open_recorder(run: TrainRun, start: Start) -> Recorder:
    recorder = Recorder(
        run.run_dir, resumed_step=start.state.step, total_steps=run.train.steps, enabled=run.ranks.is_main
    )
    wait_for_all()
    if start.folder is not None:
        recorder.say(f"resuming from {start.folder}")
    return recorder


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


def build_together(build: Callable[[], T]) -> T:
    """What `build` returns; an error it raises on any rank is raised on all of them, as RunFailed."""
    try:
        built = build()
    except Exception as error:
        raise_together(error)
        raise
    raise_together(None)
    return built


def read_validation(run: TrainRun) -> list[TrainBatch]:
    """This rank's first validation micro-batches, train.eval_rows over all ranks; errors are raised on all ranks."""
    assert run.build_validation_loader is not None
    rows_at_once = run.train.micro_batch_rows * run.ranks.world_size
    limit = -(-run.train.eval_rows // rows_at_once) if run.train.eval_rows else None
    batches: list[TrainBatch] = []
    loader = build_together(run.build_validation_loader)
    iterator = build_together(lambda: iter(loader))
    while limit is None or len(batches) < limit:
        batch = build_together(lambda: next(iterator, None))
        ended = sum_integers([int(batch is None)])[0]
        if 0 < ended < run.ranks.world_size:
            raise RunFailed(f"the validation loader ended on {ended} of {run.ranks.world_size} ranks only")
        if batch is None:
            break
        batches.append(batch)
    if not batches:
        raise RunFailed("the validation loader has no rows; set train.eval_every_steps=0 or prepare more data")
    return batches
