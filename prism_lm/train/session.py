"""What one process holds while a run goes on, and how it is opened: fresh, or from a checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from prism_lm.checkpoint.load import check_fits, load_weights, newest_checkpoint, read_rank_state, read_trainer
from prism_lm.checkpoint.manager import CheckpointManager
from prism_lm.parallel.collectives import RunFailed, call_together, gather_objects, sum_integers
from prism_lm.parallel.mesh import check_devices
from prism_lm.train.config import check_parallel, compute_accumulation_steps
from prism_lm.train.engine import Engine, build_engine, end_process_group
from prism_lm.train.guard import Guard
from prism_lm.train.metrics import Meter, find_peak_flops
from prism_lm.train.probe import check_probe, take_probe
from prism_lm.train.state import (
    Loader,
    TrainRun,
    TrainState,
    capture_generators,
    hash_seed,
    restore_generators,
    seed_generators,
)
from prism_lm.train.step import TrainBatch
from prism_lm.train.stop_signal import StopSignal
from prism_lm.train.straggler import StragglerWatch
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
    stragglers: StragglerWatch
    recorder: Recorder
    stop: StopSignal
    guard: Guard
    position: dict[str, Any]
    "The training loader's place after the last step taken, which a checkpoint holds."
    probe_row: Mapping[str, torch.Tensor] | None = None
    "This process's part of the row whose logits a checkpoint holds; None before the first batch."
    validation_batches: list[TrainBatch] = field(default_factory=list[TrainBatch])
    "This rank's validation rows where train.eval_rows limits them, read once and evaluated each time."
    figures: dict[str, float] = field(default_factory=dict[str, float])
    "What the current step has to record."
    histograms: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    "The same, of histograms."
    texts: dict[str, str] = field(default_factory=dict[str, str])
    "The same, of texts."

    @property
    def accumulation_steps(self) -> int:
        return compute_accumulation_steps(self.run.train, self.run.ranks)

    def agree_on_stop(self) -> bool:
        """True on every rank where any rank was asked to stop."""
        return sum_integers([int(self.stop.requested)])[0] > 0


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
    if run.train.tasks.every_steps and run.task_scorer is None:
        raise ValueError(
            f"train.tasks.every_steps={run.train.tasks.every_steps} must be 0 without a scorer of tasks; "
            "use train.tasks.every_steps=0"
        )
    folder = newest_checkpoint(run.run_dir)
    if folder is None:
        return Start(state=TrainState(), folder=None)
    trainer = read_trainer(folder)
    check_fits(folder, trainer, run.list_fixed())
    return Start(state=TrainState.from_trainer(trainer), folder=folder)


def open_session(run: TrainRun, start: Start, stop: StopSignal, guard: Guard, stack: ExitStack) -> Session:
    """Builds model, engine and loaders and restores the checkpoint. What does not fit is refused here at the latest,
    and the run's records stay as they are.

    The process group must be up. What it opens is closed with `stack`.
    """
    agree_on_start(run, start)
    manager = CheckpointManager(run.run_dir, run.train.checkpoint, run.ranks, check_owner=guard.owner.check)
    if start.folder is not None:
        manager.verify(start.folder)
    loader = call_together(run.build_train_loader)
    validation_loader = _open_validation(run)
    engine = _build_engine(run, start.folder)
    stack.callback(end_process_group)
    stack.callback(engine.close)
    if start.folder is not None:
        _restore(run, start.folder, engine, loader)
    meter = _build_meter(run, engine)
    every_steps = run.train.straggler_every_steps
    return Session(
        run=run,
        state=start.state,
        engine=engine,
        loader=loader,
        validation_loader=validation_loader,
        micro_batches=call_together(lambda: iter(loader)),
        manager=manager,
        meter=meter,
        stragglers=StragglerWatch(run.ranks, engine.stopwatch, meter, every_steps=every_steps),
        recorder=_build_recorder(run, start),
        stop=stop,
        guard=guard,
        position=loader.state_dict(),
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


def _build_engine(run: TrainRun, folder: Path | None) -> Engine:
    """On a model with the checkpoint's weights, which every stage takes over and cuts as it likes."""
    seed_generators(run.seed)
    model = run.build_model()
    if folder is not None:
        call_together(lambda: load_weights(model, folder))
    engine = build_engine(model, run.train, run.parallel, run.ranks, run.run_dir / ENGINE_LOG_NAME)
    seed_generators(run.seed + 1 + run.ranks.rank)
    return engine


def _restore(run: TrainRun, folder: Path, engine: Engine, loader: Loader) -> None:
    """The rest of the state, and the proof that it is there."""
    trainer = call_together(lambda: read_trainer(folder))
    call_together(lambda: engine.load(folder))
    call_together(lambda: loader.load_state_dict(trainer["loader"]))
    arrangement = run.describe_arrangement()
    is_same = all(trainer.get(key) == value for key, value in arrangement.items())
    check_probe(engine, folder, run.ranks, precision=run.train.precision, is_same=is_same)
    if trainer.get("world_size") == run.ranks.world_size:
        call_together(lambda: restore_generators(read_rank_state(folder, run.ranks.rank)))
    else:
        seed_generators(hash_seed(run.seed, int(trainer["step"]), run.ranks.rank))


def _build_recorder(run: TrainRun, start: Start) -> Recorder:
    return Recorder(run.run_dir, resumed_step=start.state.step, total_steps=run.train.steps, enabled=run.ranks.is_main)


def _build_meter(run: TrainRun, engine: Engine) -> Meter:
    peak_flops = find_peak_flops(engine.device, run.train.precision)
    return Meter(
        total_steps=run.train.steps,
        flops_per_token=run.flops_per_token,
        peak_flops=None if peak_flops is None else peak_flops * run.ranks.world_size,
    )


def save_session(session: Session, *, wait: bool) -> None:
    """Saves this step, unless it is saved already; wait: return once it is published."""
    if session.manager.has_saved(session.state.step):
        return session.manager.finish() if wait else None
    row, ranks = session.probe_row, session.run.ranks
    session.manager.save(
        session.state.step,
        engine=session.engine,
        trainer={**session.state.describe(session.run), "loader": session.position},
        rank_state=capture_generators(),
        probe={} if row is None else take_probe(session.engine, row, ranks),
        wait=wait,
    )
