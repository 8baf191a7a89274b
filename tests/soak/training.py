"""The tiny training that is killed, as one rank of it runs."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from prism_lm.checkpoint.manager import CheckpointConfig
from prism_lm.model.lm import LanguageModel
from prism_lm.model.operators import build_plain_operators
from prism_lm.parallel.apply import ParallelConfig, apply_to_operators
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.config import TrainConfig
from prism_lm.train.loop import run_training
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.state import TrainRun
from tests.harness import ListLoader, TinyModel, build_language_config, build_run, read_ranks
from tests.soak.death import VALIDATION_TOKEN, Death, note_pid
from tests.soak.plan import ACCUMULATION, EVAL_EVERY_STEPS, KEEP_LAST, STEPS, VALIDATION_BATCHES, Kill, Setting

GLOBAL_ROWS, ROW_TOKENS = 8, 32


class DrawingModel(TinyModel):
    """Draws from the generator in training, so that a resume that does not restore it has other losses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(block, nn.Dropout(0.1)) for block in self.blocks)


class KillableLoader(ListLoader):
    """A list loader that knows when a resume restores it and when it is first asked for a batch."""

    death: Death | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.come_to("restored")

    def __iter__(self) -> Iterator[Any]:
        self.come_to("first_fetch")
        yield from super().__iter__()

    def come_to(self, place: str) -> None:
        if self.death is not None and self.death.kill.point == "after_resume":
            self.death.come_to(place)


def mark_validation(step: int, batch: dict[str, Tensor]) -> None:
    """Sets the token by which a forward is told to be one of evaluation."""
    batch["input_ids_BT"][:, 0] = VALIDATION_TOKEN


def train(run_dir: str, setting: Setting, kill: Kill | None, attempt_dir: str) -> str:
    """One rank of a start; what it prints goes to a file of the attempt."""
    rank, attempt = read_ranks().rank, Path(attempt_dir)
    log = os.open(attempt / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    note_pid(attempt, rank)
    is_victim = kill is not None and kill.who in (None, rank)
    death = Death(kill, attempt) if kill is not None and is_victim else None
    with pytest.MonkeyPatch.context() as patch:
        if death is not None:
            death.watch_disk(patch)
        return run_training(build_killable_run(Path(run_dir), setting, death))


def build_killable_run(run_dir: Path, setting: Setting, death: Death | None = None) -> TrainRun:
    """The run of a setting, on this process's rank; nothing in it kills without a death."""
    config = build_config(setting)
    ranks = replace(read_ranks(), sequence_degree=setting.sequence_degree)

    def open_loader(**settings: Any) -> KillableLoader:
        rows = {"global_rows": GLOBAL_ROWS, "micro_rows": config.micro_batch_rows, "row_tokens": ROW_TOKENS}
        return KillableLoader(ranks, **rows, **settings)

    def open_train_loader() -> KillableLoader:
        loader = open_loader()
        loader.death = death
        return loader

    run = build_run(run_dir, config, parallel=ParallelConfig(sequence_degree=setting.sequence_degree, kernels="plain"))
    per_rank = VALIDATION_BATCHES // ranks.world_size
    return replace(
        run,
        ranks=ranks,
        build_model=lambda: build_model(setting, ranks, death),
        build_train_loader=open_train_loader,
        build_validation_loader=lambda: open_loader(end_at=per_rank, spoil=mark_validation),
    )


def build_model(setting: Setting, ranks: Ranks, death: Death | None) -> nn.Module:
    """The setting's model, watched by the death; the first moments after a resume are here."""
    model: nn.Module = DrawingModel()
    if setting.model == "language":
        model = LanguageModel(build_language_config(), operators=apply_to_operators(build_plain_operators(), ranks))
    if death is None:
        return model
    death.watch_model(model)
    if death.kill.point == "after_resume":
        death.come_to("built")
    if death.kill.place == "soon":
        death.strike_after(death.kill.delay_s)
    return model


def build_config(setting: Setting) -> TrainConfig:
    """STEPS steps with an evaluation and a save every few, each update over ACCUMULATION micro-batches."""
    data_ranks = setting.num_processes // setting.sequence_degree
    saving = {"asynchronous": True} if setting.asynchronous else {}
    return TrainConfig(
        steps=STEPS,
        global_batch_rows=GLOBAL_ROWS,
        micro_batch_rows=GLOBAL_ROWS // data_ranks // ACCUMULATION,
        log_every_steps=1,
        eval_every_steps=EVAL_EVERY_STEPS,
        zero_stage=setting.zero_stage,
        schedule=ScheduleConfig(warmup_steps=2),
        checkpoint=CheckpointConfig(save_every_steps=setting.save_every_steps, keep_last=KEEP_LAST, **saving),
    )
