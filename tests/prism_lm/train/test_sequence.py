"""Rows cut over processes train as whole rows do: every mesh and stage against fp64, by the error of one process."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prism_lm.model.lm import LanguageModel
from prism_lm.model.operators import build_plain_operators
from prism_lm.parallel.apply import ParallelConfig, apply_to_operators
from prism_lm.parallel.collectives import sum_integers
from prism_lm.parallel.mesh import Ranks, process_group
from prism_lm.train.config import TrainConfig
from prism_lm.train.engine import Engine, build_engine
from prism_lm.train.optim import OptimConfig, build_adamw
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.step import StepResult, count_valid_tokens, train_step
from tests.harness import ListLoader, build_batch, build_language_config, read_ranks, run_on

GLOBAL_ROWS, STEPS, RATE, MAX_NORM = 4, 3, 0.02, 0.5
# Slices of 40 and of 20 tokens, in chunks of 16; most slices hold no document start, so that states pass through them.
ROWS = {"row_tokens": 80, "starts": 0.01}
# Large beside the rounding of a gradient and small beside a gradient, so that an update shows the gradient's size.
OPTIM = OptimConfig(learning_rate=RATE, epsilon=1e-3)


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    precision: Any = "fp32"
    zero_stage: Any = 0
    checkpointing: bool = False


VARIANTS = [
    *(Variant(zero_stage=stage, checkpointing=stage >= 2) for stage in range(4)),
    Variant("bf16", 2, checkpointing=True),
]
# What errors may differ by beyond a factor of two, as shares of what is exact, where chance made one process's small:
# sums of some hundred fp32 terms, each rounded by 2^-24, in another order; in bf16 two roundings of 2^-9.
FLOORS = {"fp32": 2**-17, "bf16": 2**-8}


@dataclass(frozen=True)
class Outcome:
    """What the steps of a run gave."""

    losses: Tensor
    norms: Tensor
    weights: dict[str, Tensor]


def build_hybrid(ranks: Ranks) -> LanguageModel:
    """All three mixers; the PRISM layers on either side of an attention layer need its gradients."""
    config = build_language_config(num_layers=4, layer_pattern=["prism", "attention", "prism", "gated_delta"])
    torch.manual_seed(0)
    return LanguageModel(config, operators=apply_to_operators(build_plain_operators(), ranks))


def take_step(engine: Engine, config: TrainConfig, ranks: Ranks, step: int) -> StepResult:
    """An update from two micro-batches."""
    loader = ListLoader(ranks, global_rows=GLOBAL_ROWS, micro_rows=config.micro_batch_rows, **ROWS)
    loader.load_state_dict({"taken": 2 * step})
    batches = [batch for _, batch in zip(range(2), loader, strict=False)]
    valid_tokens = sum_integers([count_valid_tokens(batches)])[0]
    return train_step(engine, batches, valid_tokens=valid_tokens, world_size=ranks.world_size, learning_rate=RATE)


def train_with_engine(variant: Variant, ranks: Ranks, folder: str) -> Outcome:
    config = TrainConfig(
        steps=STEPS,
        global_batch_rows=GLOBAL_ROWS,
        micro_batch_rows=GLOBAL_ROWS // (2 * ranks.data_world_size),
        precision=variant.precision,
        zero_stage=variant.zero_stage,
        max_grad_norm=MAX_NORM,
        optim=OPTIM,
        schedule=ScheduleConfig(warmup_steps=0),
    )
    parallel = ParallelConfig(
        sequence_degree=ranks.sequence_degree, activation_checkpointing=variant.checkpointing, kernels="plain"
    )
    engine = build_engine(build_hybrid(ranks), config, parallel, ranks, Path(folder) / "deepspeed.log")
    results = [take_step(engine, config, ranks, step) for step in range(STEPS)]
    assert all(result.applied for result in results)
    losses = torch.tensor([float(result.loss_nats) for result in results], dtype=torch.float64)
    norms = torch.tensor([result.grad_norm for result in results], dtype=torch.float64)
    weights = engine.gather_weights()
    engine.close()
    return Outcome(losses, norms, weights)


def train_variants(sequence_degree: int, folder: str) -> list[Outcome]:
    ranks = replace(read_ranks(), sequence_degree=sequence_degree)
    with process_group(ranks):
        return [train_with_engine(variant, ranks, folder) for variant in VARIANTS]


def start_exactly(precision: str) -> LanguageModel:
    """The weights an engine starts from, in fp64: in bf16 those of the model rounded once."""
    model = build_hybrid(Ranks())
    return (model.bfloat16() if precision == "bf16" else model).double()


def train_exactly(precision: str) -> Outcome:
    """The same steps in plain torch and fp64: one process, the whole global batch at once."""
    model = start_exactly(precision)
    adamw = build_adamw(model, OPTIM)
    losses, norms = [], []
    for step in range(STEPS):
        batch = build_batch(GLOBAL_ROWS, seed=step, **ROWS)
        loss = model(**batch) / count_valid_tokens([batch])
        loss.backward()
        losses.append(loss.detach().double())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        adamw.step()
        adamw.zero_grad()
    return Outcome(torch.stack(losses), torch.stack(norms), dict(model.named_parameters()))


@pytest.fixture(scope="module")
def exact() -> dict[str, Outcome]:
    return {precision: train_exactly(precision) for precision in ("fp32", "bf16")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """Every variant in one process."""
    (outcomes,) = run_on(1, train_variants, 1, str(tmp_path_factory.mktemp("alone")))
    return outcomes


def measure_errors(outcome: Outcome, exact: Outcome, precision: str) -> dict[str, float]:
    """Of losses, norms and updates (Euclidean norms), as shares of what is exact; in bf16 of all updates at once, since
    single ones drown in the rounding of their weights."""
    start = dict(start_exactly(precision).named_parameters())
    made = {name: outcome.weights[name].double() - weight.detach() for name, weight in start.items()}
    due = {name: (exact.weights[name] - weight).detach() for name, weight in start.items()}
    if precision == "bf16":
        made, due = ({"updates": torch.cat([update.flatten() for update in all_.values()])} for all_ in (made, due))
    made |= {"losses": outcome.losses, "norms": outcome.norms}
    due |= {"losses": exact.losses, "norms": exact.norms}
    return {name: float((made[name] - value).norm() / value.norm()) for name, value in due.items()}


@pytest.mark.parametrize(("num_processes", "sequence_degree"), [(2, 2), (4, 4), (4, 2)], ids=["1x2", "1x4", "2x2"])
def test_rows_cut_over_processes_train_as_whole_rows_do_at_every_stage(
    num_processes: int, sequence_degree: int, exact: dict[str, Outcome], alone: list[Outcome], tmp_path: Path
) -> None:
    outcomes = run_on(num_processes, train_variants, sequence_degree, str(tmp_path))[0]
    for variant, outcome, reference in zip(VARIANTS, outcomes, alone, strict=True):
        errors = measure_errors(outcome, exact[variant.precision], variant.precision)
        allowed = measure_errors(reference, exact[variant.precision], variant.precision)
        for name, error in errors.items():
            bound = 2 * allowed[name] + FLOORS[variant.precision]
            assert error <= bound < 0.5, f"{name} of {variant} is off by {error:.1e}, not {bound:.1e}"
