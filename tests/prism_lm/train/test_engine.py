"""DeepSpeed's stages against plain torch on the whole global batch, and steps that must not be applied."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from prism_lm.parallel.apply import ParallelConfig
from prism_lm.parallel.collectives import sum_integers
from prism_lm.parallel.mesh import Ranks, process_group
from prism_lm.train.config import TrainConfig
from prism_lm.train.engine import Engine, build_engine, derive_settings
from prism_lm.train.optim import OptimConfig, build_adamw
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.step import StepResult, count_valid_tokens, train_step
from tests.harness import ListLoader, TinyModel, assert_error_within, build_batch, run_on

GLOBAL_ROWS, MICRO_ROWS, STEPS, RATE = 8, 2, 3, 0.05
# A large epsilon makes the update smooth in the gradient: where Adam divides by a root near 0, it turns rounding of
# a tiny gradient into a whole step, and no tolerance on weights could be derived.
OPTIM = OptimConfig(learning_rate=RATE, epsilon=1.0)
ALL_STAGES = [("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 1), ("bf16", 2), ("bf16", 3)]
NAN_LOSS, INFINITE_LOSS, NAN_GRADIENT = 61, 62, 63
"Tokens that never occur in ordinary batches and spoil a SpoilableModel, each in its way."


def build_config(precision: str, stage: int) -> TrainConfig:
    return TrainConfig(
        steps=STEPS,
        global_batch_rows=GLOBAL_ROWS,
        micro_batch_rows=MICRO_ROWS,
        precision=precision,
        zero_stage=stage,
        max_grad_norm=0.5,
        optim=OPTIM,
        schedule=ScheduleConfig(warmup_steps=0),
    )


def build_tiny_engine(config: TrainConfig, folder: str, model: torch.nn.Module) -> Engine:
    return build_engine(model, config, ParallelConfig(), Ranks.from_environment(), Path(folder) / "deepspeed.log")


def take_step(engine: Engine, loader_step: int, *, spoil_rank_1: int | None = None) -> StepResult:
    ranks = Ranks.from_environment()
    loader = ListLoader(ranks, global_rows=GLOBAL_ROWS, micro_rows=MICRO_ROWS)
    per_step = GLOBAL_ROWS // (MICRO_ROWS * ranks.world_size)
    loader.load_state_dict({"taken": loader_step * per_step})
    batches = [batch for _, batch in zip(range(per_step), loader, strict=False)]
    if spoil_rank_1 is not None and ranks.rank == 1:
        batches[0]["input_ids_BT"][0, 0] = spoil_rank_1
    valid_tokens = sum_integers([count_valid_tokens(batches)])[0]
    return train_step(engine, batches, valid_tokens=valid_tokens, world_size=ranks.world_size, learning_rate=RATE)


def train_with_engines(folder: str) -> list[tuple[list[float], list[float], dict[str, Tensor]]]:
    """Losses, gradient norms and final weights of every precision and stage."""
    outcomes = []
    with process_group(Ranks.from_environment()):
        for precision, stage in ALL_STAGES:
            torch.manual_seed(0)
            engine = build_tiny_engine(build_config(precision, stage), folder, TinyModel())
            results = [take_step(engine, step) for step in range(STEPS)]
            assert all(result.applied for result in results)
            norms = [result.grad_norm for result in results]
            outcomes.append(([float(result.loss_nats) for result in results], norms, engine.gather_weights()))
            engine.close()
    return outcomes


def train_plainly() -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same steps in plain torch: one process, the whole global batch at once."""
    torch.manual_seed(0)
    model = TinyModel()
    adamw = build_adamw(model, OPTIM)
    losses, norms = [], []
    for step in range(STEPS):
        batch = build_batch(GLOBAL_ROWS, seed=step)
        loss = model(**batch) / count_valid_tokens([batch])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(loss.item())
        adamw.step()
        adamw.zero_grad()
    return losses, norms, dict(model.named_parameters())


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_every_stage_makes_the_update_of_the_whole_global_batch(num_processes: int, tmp_path: Path) -> None:
    losses, norms, weights = train_plainly()
    outcomes = run_on(num_processes, train_with_engines, str(tmp_path))[0]
    for (precision, stage), (engine_losses, engine_norms, engine_weights) in zip(ALL_STAGES, outcomes, strict=True):
        # fp32: sums of some hundred terms in another order, each rounded by 2^-24, over three steps. bf16: a gradient
        # passes four roundings of 2^-9 on its way through a block.
        bound = 2**-20 if precision == "fp32" else 2**-7
        what = f"{precision}, stage {stage}, {num_processes} processes"
        assert_error_within(torch.tensor(engine_losses), torch.tensor(losses), bound, what=f"loss of {what}")
        assert_error_within(torch.tensor(engine_norms), torch.tensor(norms), bound, what=f"norm of {what}")
        assert engine_weights.keys() == weights.keys()
        for name, expected in weights.items():
            assert_error_within(engine_weights[name], expected, bound, what=f"{name} of {what}")


class SpoilableModel(TinyModel):
    """TinyModel, spoiled by one token: a NaN loss, an infinite loss with finite gradients, or NaN gradients alone."""

    def forward(self, input_ids_BT: Tensor, document_start_BT: Tensor, labels_BT: Tensor) -> Tensor:
        loss = super().forward(input_ids_BT, document_start_BT, labels_BT)
        match int(input_ids_BT[0, 0]):
            case 61:
                return loss * torch.nan
            case 62:
                return loss + torch.inf
            case 63:
                return loss + torch.sqrt(loss * 0)
            case _:
                return loss


def compute_digest(engine: Engine) -> str:
    """Over weights, masters, moments and step counts of this rank, to the bit."""
    digest = hashlib.sha256()
    tensors = [weight for _, weight in sorted(engine.gather_weights().items())]
    assert engine._adamw.state
    for master, moments in engine._adamw.state.items():
        tensors += [master.detach(), *(moments[name] for name in ("exp_avg", "exp_avg_sq", "step"))]
    for tensor in tensors:
        digest.update(tensor.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def skip_in_engines(folder: str) -> None:
    """In every stage: spoiled steps change nothing, and the run goes on as if they had not been."""
    with process_group(Ranks.from_environment()):
        for precision, stage in ALL_STAGES:
            what = f"{precision}, stage {stage}"
            engines = []
            for _ in range(2):
                torch.manual_seed(0)
                engines.append(build_tiny_engine(build_config(precision, stage), folder, SpoilableModel()))
                assert take_step(engines[-1], 0).applied
            before = compute_digest(engines[0])
            for token in (NAN_LOSS, INFINITE_LOSS, NAN_GRADIENT):
                spoiled = take_step(engines[0], 1, spoil_rank_1=token)
                assert not spoiled.applied, (token, what)
                assert ("rank 1" in spoiled.problem) == (token != NAN_GRADIENT), spoiled.problem
                assert compute_digest(engines[0]) == before, (token, what)
            assert all(take_step(engine, 2).applied for engine in engines)
            assert compute_digest(engines[0]) == compute_digest(engines[1]) != before, what
            for engine in engines:
                engine.close()


def test_step_spoiled_on_one_rank_changes_no_bit_of_any_rank(tmp_path: Path) -> None:
    run_on(2, skip_in_engines, str(tmp_path))


def test_gradients_are_summed_sent_and_kept_in_fp32_for_bf16_weights() -> None:
    settings = derive_settings(build_config("bf16", 2), Ranks(world_size=2), num_parameters=10)
    assert settings["communication_data_type"] == "fp32"
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
    assert settings["gradient_accumulation_steps"] == GLOBAL_ROWS // (2 * MICRO_ROWS)
