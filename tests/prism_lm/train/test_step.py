"""A step above the loss limit, or given up between micro-batches, changes no weight and no moment."""

import hashlib
import math
from pathlib import Path

import pytest
import torch

from prism_lm.parallel.apply import ParallelConfig
from prism_lm.parallel.collectives import sum_integers
from prism_lm.parallel.mesh import Ranks, process_group
from prism_lm.train.config import TrainConfig
from prism_lm.train.engine import Engine, build_engine
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.step import (
    StepResult,
    TrainBatch,
    compute_validation_losses,
    count_valid_tokens,
    move_to_device,
    train_step,
)
from tests.harness import ListLoader, TinyModel, read_ranks, run_on

GLOBAL_ROWS, MICRO_ROWS = 8, 2
ALL_STAGES = [("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 1), ("bf16", 2), ("bf16", 3)]


def build_tiny_engine(folder: str, precision: str, stage: int) -> Engine:
    torch.manual_seed(0)
    config = TrainConfig(
        steps=3,
        global_batch_rows=GLOBAL_ROWS,
        micro_batch_rows=MICRO_ROWS,
        precision=precision,
        zero_stage=stage,
        schedule=ScheduleConfig(warmup_steps=0),
    )
    return build_engine(TinyModel(), config, ParallelConfig(), read_ranks(), Path(folder) / "deepspeed.log")


def load_step(step: int) -> list[TrainBatch]:
    ranks = read_ranks()
    loader = ListLoader(ranks, global_rows=GLOBAL_ROWS, micro_rows=MICRO_ROWS)
    per_step = GLOBAL_ROWS // (MICRO_ROWS * ranks.world_size)
    loader.load_state_dict({"taken": step * per_step})
    return [batch for _, batch in zip(range(per_step), loader, strict=False)]


def take_step(engine: Engine, step: int, max_loss_nats: float = math.inf) -> StepResult:
    batches = load_step(step)
    result = train_step(
        engine,
        batches,
        valid_tokens=sum_integers([count_valid_tokens(batches)])[0],
        world_size=read_ranks().world_size,
        learning_rate=0.05,
        max_loss_nats=max_loss_nats,
    )
    assert result is not None
    return result


def compute_digest(engine: Engine) -> str:
    """Over weights, and this rank's masters, moments and step counts, to the bit."""
    tensors = [weight for _, weight in sorted(engine.gather_weights().items())]
    for master, moments in engine._adamw.state.items():
        tensors += [master.detach(), *(moments[name] for name in ("exp_avg", "exp_avg_sq", "step"))]
    return hashlib.sha256(b"".join(t.float().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def pass_limits(folder: str) -> None:
    with process_group(read_ranks()):
        for precision, stage in ALL_STAGES:
            what = f"{precision}, stage {stage}"
            limited, free = (build_tiny_engine(folder, precision, stage) for _ in range(2))
            first = [
                float(take_step(engine, 0, limit).loss_nats) for engine, limit in ((limited, 99.0), (free, math.inf))
            ]
            assert first[0] == first[1] and compute_digest(limited) == compute_digest(free), what
            before = compute_digest(limited)
            above = take_step(limited, 1, max_loss_nats=1.0)
            assert not above.applied and compute_digest(limited) == before, what
            loss_nats = float(above.loss_nats)
            assert above.problem == f"the loss of {loss_nats:.4f} nats is above the spike threshold of 1.0000 nats"
            at_limit = take_step(limited, 1, max_loss_nats=loss_nats)
            assert at_limit.applied and float(at_limit.loss_nats) == loss_nats and at_limit.problem == "", what
            assert take_step(free, 1).applied
            assert compute_digest(limited) == compute_digest(free) != before, what
            for engine in (limited, free):
                engine.close()


def test_step_is_left_out_above_the_global_loss_limit_and_made_at_it_in_every_stage(tmp_path: Path) -> None:
    run_on(2, pass_limits, str(tmp_path))


def give_up(folder: str, precision: str, stage: int) -> None:
    with process_group(read_ranks()):
        engine = build_tiny_engine(folder, precision, stage)
        take_step(engine, 0)
        before, asked = compute_digest(engine), []

        def stop_at_second() -> bool:
            asked.append(True)
            return True

        batches = load_step(1)
        assert len(batches) == 2
        world_size = read_ranks().world_size
        result = train_step(
            engine, batches, valid_tokens=9, world_size=world_size, learning_rate=0.05, should_stop=stop_at_second
        )
        assert result is None and len(asked) == 1
        assert compute_digest(engine) == before
        engine.close()


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 0), ("bf16", 2), ("fp32", 3)])
def test_step_given_up_between_micro_batches_changes_no_bit(precision: str, stage: int, tmp_path: Path) -> None:
    run_on(2, give_up, str(tmp_path), precision, stage)


class CountingEngine:
    """Says how many micro-batches it evaluated; each has a loss sum of 6 nats."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.evaluated = 0

    def evaluate_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.evaluated += 1
        return torch.tensor(6.0)


def test_validation_pass_ends_without_a_figure_at_the_none_among_its_batches() -> None:
    batch: TrainBatch = next(iter(ListLoader(Ranks(), global_rows=2, micro_rows=1)))
    engine = CountingEngine()
    assert compute_validation_losses(engine, [batch, None, batch]) is None
    assert engine.evaluated == 1
    assert compute_validation_losses(engine, [batch, batch]) == pytest.approx([6.0 / count_valid_tokens([batch])])
    assert compute_validation_losses(engine, []) == [None]


class TokenEngine(CountingEngine):
    """Each token's loss is its own number, where it has one."""

    def evaluate_token_losses(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.evaluated += 1
        return torch.where(batch["labels_BT"] == -100, 0, batch["input_ids_BT"]).float()


def test_each_sources_tokens_are_averaged_over_its_own_and_padding_belongs_to_none() -> None:
    tokens = torch.tensor([[2, 4], [10, 30], [6, 0], [0, 0]])
    labels = torch.tensor([[1, 1], [1, 1], [1, -100], [-100, -100]])
    rows = {"document_start_BT": tokens > 99, "row_hash_B": tokens[:, 0], "source_B": torch.tensor([0, 2, 0, -1])}
    batch = TrainBatch(input_ids_BT=tokens, labels_BT=labels, **rows)
    engine = TokenEngine()
    assert compute_validation_losses(engine, [batch, batch], num_sources=4) == [52 / 5, 4.0, None, 20.0, None]
    assert engine.evaluated == 2
    assert compute_validation_losses(engine, [batch, None], num_sources=4) is None


def test_what_a_batch_says_about_its_rows_stays_on_the_host() -> None:
    batch: TrainBatch = next(iter(ListLoader(Ranks(), global_rows=2, micro_rows=1)))
    of_rows = {"row_hash_B", "source_B"}
    assert of_rows < batch.keys()
    assert move_to_device(batch, torch.device("cpu")).keys() == batch.keys() - of_rows
