"""DeepSpeed's stages against plain torch on the whole global batch, and steps that must not be applied."""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from prism_lm.checkpoint import folder as disk
from prism_lm.checkpoint.fragments import KINDS, OPTIMIZER_NAME, build_index, list_parameters, read_full, read_index
from prism_lm.checkpoint.load import load_weights
from prism_lm.checkpoint.share import MainShare, Share
from prism_lm.parallel.apply import ParallelConfig
from prism_lm.parallel.collectives import gather_objects, sum_integers
from prism_lm.parallel.mesh import Ranks, process_group
from prism_lm.train.config import TrainConfig
from prism_lm.train.engine import Engine, build_engine, derive_settings
from prism_lm.train.optim import OptimConfig, build_adamw
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.step import StepResult, count_valid_tokens, train_step
from tests.harness import ListLoader, TinyModel, assert_error_within, build_batch, read_ranks, run_on

GLOBAL_ROWS, MICRO_ROWS, STEPS, RATE = 8, 2, 3, 0.05
MAX_NORM, OTHER_MAX_NORM = 0.5, 0.25
# Below the root mean square of a clipped gradient, 0.5 over 40,000 weights, so that Adam divides; above the rounding of
# a tiny one, which Adam would turn into a whole step.
OPTIM = OptimConfig(learning_rate=RATE, epsilon=1e-3)
OTHER_OPTIM = OptimConfig(learning_rate=RATE, epsilon=3e-3, beta1=0.5, beta2=0.7, weight_decay=0.5)
ALL_STAGES = [("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 1), ("bf16", 2), ("bf16", 3)]
RESUMED_STAGES = [("fp32", 0), ("fp32", 1), ("fp32", 3), ("bf16", 1), ("bf16", 2)]
NAN_LOSS, INFINITE_LOSS, NAN_GRADIENT = 61, 62, 63
"Tokens that never occur in ordinary batches and spoil a SpoilableModel, each in its way."


def build_config(precision: str, stage: int) -> TrainConfig:
    return TrainConfig(
        steps=STEPS,
        global_batch_rows=GLOBAL_ROWS,
        micro_batch_rows=MICRO_ROWS,
        precision=precision,
        zero_stage=stage,
        max_grad_norm=MAX_NORM,
        optim=OPTIM,
        schedule=ScheduleConfig(warmup_steps=0),
    )


def build_tiny_engine(config: TrainConfig, folder: str, model: torch.nn.Module) -> Engine:
    return build_engine(model, config, ParallelConfig(), read_ranks(), Path(folder) / "deepspeed.log")


def take_step(engine: Engine, loader_step: int, *, spoil_rank_1: int | None = None) -> StepResult:
    ranks = read_ranks()
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
    with process_group(read_ranks()):
        for precision, stage in ALL_STAGES:
            torch.manual_seed(0)
            engine = build_tiny_engine(build_config(precision, stage), folder, TinyModel())
            results = [take_step(engine, step) for step in range(STEPS)]
            assert all(result.applied for result in results)
            norms = [result.grad_norm for result in results]
            outcomes.append(([float(result.loss_nats) for result in results], norms, engine.gather_weights()))
            engine.close()
    return outcomes


def write_state(engine: Engine, folder: Path) -> None:
    """What a checkpoint of this engine holds, without manifest; every rank writes its part."""
    ranks, staged = read_ranks(), engine.stage()
    index = build_index(staged.shapes, gather_objects(staged.pieces), staged.applied_steps)
    main = MainShare(weights=staged.weights, index=index, trainer={}, probe={}) if ranks.is_main else None
    for name in ("ranks", OPTIMIZER_NAME):
        (folder / name).mkdir(parents=True, exist_ok=True)
    Share(rank=ranks.rank, optimizer=staged.optimizer, rank_state={}, main=main).write(folder)
    sum_integers([0])


def start_plainly(precision: str) -> TinyModel:
    """The weights an engine starts from: in bf16 those of the model rounded once."""
    torch.manual_seed(0)
    model = TinyModel()
    return model.bfloat16().float() if precision == "bf16" else model


def step_plainly(
    model: TinyModel, adamw: torch.optim.Optimizer, step: int, max_grad_norm: float
) -> tuple[float, float]:
    """Loss and gradient norm of a step in plain torch and fp32: one process, the whole global batch at once."""
    batch = build_batch(GLOBAL_ROWS, seed=step)
    loss = model(**batch) / count_valid_tokens([batch])
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
    adamw.step()
    adamw.zero_grad()
    return loss.item(), norm


def compute_updates(weights: dict[str, Tensor], precision: str) -> dict[str, Tensor]:
    """What training added to the weights it started from."""
    start = dict(start_plainly(precision).named_parameters())
    assert weights.keys() == start.keys()
    return {name: weights[name].detach().double() - start[name].detach().double() for name in start}


# What an update may be off by, as shares of itself and of its weight (Euclidean norms). fp32: gradients are off by some
# 2^-24 of the largest in their tensor, which division by epsilon raises 2^6 times. bf16: a gradient passes a few
# roundings of 2^-9. Every weight is rounded once more as it is stored.
UPDATE_BOUNDS = {"fp32": (2**-18, 2**-23), "bf16": (2**-6, 2**-9)}


def assert_updates_agree(weights: dict[str, Tensor], expected: dict[str, Tensor], precision: str, what: str) -> None:
    """Each weight's update is the expected one, within a bound that no missing update passes."""
    share, rounding = UPDATE_BOUNDS[precision]
    updates, expected_updates = compute_updates(weights, precision), compute_updates(expected, precision)
    for name, update in expected_updates.items():
        error = float((updates[name] - update).norm() / update.norm())
        bound = share + rounding * float(expected[name].norm() / update.norm())
        assert error <= bound < 0.25, f"{name} of {what}: the update is off by {error:.2e} of itself, not {bound:.2e}"


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_every_stage_makes_the_update_of_the_whole_global_batch(num_processes: int, tmp_path: Path) -> None:
    outcomes = run_on(num_processes, train_with_engines, str(tmp_path))[0]
    for (precision, stage), (engine_losses, engine_norms, engine_weights) in zip(ALL_STAGES, outcomes, strict=True):
        model = start_plainly(precision)
        adamw = build_adamw(model, OPTIM)
        losses, norms = zip(*(step_plainly(model, adamw, step, MAX_NORM) for step in range(STEPS)), strict=True)
        # fp32: sums of some hundred terms in another order, each rounded by 2^-24, over three steps. bf16: a gradient
        # passes four roundings of 2^-9 on its way through a block.
        bound = 2**-18 if precision == "fp32" else 2**-6
        what = f"{precision}, stage {stage}, {num_processes} processes"
        assert_error_within(torch.tensor(engine_losses), torch.tensor(losses), bound, what=f"loss of {what}")
        assert_error_within(torch.tensor(engine_norms), torch.tensor(norms), bound, what=f"norm of {what}")
        assert_updates_agree(engine_weights, dict(model.named_parameters()), precision, what)


def list_compiler(folder: str) -> list[str]:
    """Modules of the compiler that a step with an engine has imported."""
    compiler = torch.compile
    with process_group(read_ranks()):
        engine = build_tiny_engine(build_config("fp32", 1), folder, TinyModel())
        assert take_step(engine, 0).applied and torch.compile is compiler
        engine.close()
    return [name for name in sys.modules if name == "torch._inductor.compile_fx"]


def test_step_of_an_engine_imports_no_compiler(tmp_path: Path) -> None:
    assert run_on(1, list_compiler, str(tmp_path)) == [[]]


def resume_with_other_settings(folder: str) -> list[dict[str, Tensor]]:
    """Weights after one step, a checkpoint, and one step of an engine with other settings; by precision and stage."""
    weights = []
    with process_group(read_ranks()):
        for precision, stage in RESUMED_STAGES:
            place = Path(folder) / f"{precision}-{stage}"
            place.mkdir()
            config = build_config(precision, stage)
            for step, optim, max_grad_norm in ((0, OPTIM, MAX_NORM), (1, OTHER_OPTIM, OTHER_MAX_NORM)):
                torch.manual_seed(0)
                settings = replace(config, optim=optim, max_grad_norm=max_grad_norm)
                model = TinyModel()
                if step == 1:
                    load_weights(model, place)
                engine = build_tiny_engine(settings, str(place), model)
                if step == 1:
                    engine.load(place)
                assert take_step(engine, step).applied
                if step == 0:
                    write_state(engine, place)
                else:
                    weights.append(engine.gather_weights())
                engine.close()
    return weights


def test_optimizer_settings_changed_on_resume_take_effect(tmp_path: Path) -> None:
    (resumed,) = run_on(1, resume_with_other_settings, str(tmp_path))
    for (precision, stage), weights in zip(RESUMED_STAGES, resumed, strict=True):
        model = start_plainly(precision)
        adamw = build_adamw(model, OPTIM)
        step_plainly(model, adamw, 0, MAX_NORM)
        for group, other in zip(adamw.param_groups, build_adamw(model, OTHER_OPTIM).param_groups, strict=True):
            group.update({name: other[name] for name in ("betas", "eps", "weight_decay")})
        step_plainly(model, adamw, 1, OTHER_MAX_NORM)
        assert_updates_agree(weights, dict(model.named_parameters()), precision, f"{precision}, stage {stage}")


def write_all_stages(folder: str) -> None:
    """A checkpoint's engine files after two steps, by precision and stage."""
    with process_group(read_ranks()):
        for precision, stage in ALL_STAGES:
            torch.manual_seed(0)
            engine = build_tiny_engine(build_config(precision, stage), folder, TinyModel())
            assert take_step(engine, 0).applied and take_step(engine, 1).applied
            place = Path(folder) / f"{precision}-{stage}"
            write_state(engine, place)
            engine.close()


def load_in_all_stages(folder: str, again: str) -> None:
    """What every stage holds after loading what any stage of the same precision wrote is that, to the bit."""
    ranks = read_ranks()
    with process_group(ranks):
        for precision, stage in ALL_STAGES:
            for _, other in [one for one in ALL_STAGES if one[0] == precision]:
                written = Path(folder) / f"{precision}-{other}"
                model = TinyModel()
                load_weights(model, written)
                engine = build_tiny_engine(build_config(precision, stage), again, model)
                engine.load(written)
                held = Path(again) / f"{precision}-{stage}-{other}"
                write_state(engine, held)
                if ranks.is_main:
                    assert_same_state(held, written)
                assert take_step(engine, 2).applied
                engine.close()


def assert_same_state(folder: Path, expected: Path) -> None:
    assert read_index(folder).applied_steps == read_index(expected).applied_steps == 2
    assert list_parameters(folder) == list_parameters(expected) == {n: tuple(p.shape) for n, p in named_tiny()}
    for name in list_parameters(expected):
        for kind in KINDS:
            one, other = read_full(folder, name, kind), read_full(expected, name, kind)
            assert one.abs().sum() > 0 and torch.equal(one, other), (name, kind, folder)
    weights, others = (load_file(place / disk.WEIGHTS_NAME) for place in (folder, expected))
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def named_tiny() -> list[tuple[str, torch.nn.Parameter]]:
    return list(TinyModel().named_parameters())


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (4, 2)])
def test_state_of_any_stage_and_number_of_processes_loads_into_any_other_to_the_bit(
    saved_by: int, loaded_by: int, tmp_path: Path
) -> None:
    written, again = tmp_path / "written", tmp_path / "again"
    for folder in (written, again):
        folder.mkdir()
    run_on(saved_by, write_all_stages, str(written))
    run_on(loaded_by, load_in_all_stages, str(written), str(again))


def load_half_a_model(folder: str) -> None:
    """Weights of one step with the masters of another are refused."""
    with process_group(read_ranks()):
        torch.manual_seed(0)
        engine = build_tiny_engine(build_config("bf16", 1), folder, TinyModel())
        for step, name in enumerate(("first", "second")):
            take_step(engine, step)
            write_state(engine, Path(folder) / name)
        (Path(folder) / "first" / disk.WEIGHTS_NAME).rename(Path(folder) / "second" / disk.WEIGHTS_NAME)
        with pytest.raises(ValueError, match=r"fp32 copy of \S+ does not round to its weight in model.safetensors"):
            engine.load(Path(folder) / "second")
        engine.close()


def test_masters_that_do_not_belong_to_the_weights_are_refused(tmp_path: Path) -> None:
    run_on(1, load_half_a_model, str(tmp_path))


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
    with process_group(read_ranks()):
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


def test_engine_counts_a_shared_row_once_for_each_process_that_holds_a_slice() -> None:
    settings = derive_settings(build_config("fp32", 1), Ranks(world_size=4, sequence_degree=2), num_parameters=10)
    assert settings["gradient_accumulation_steps"] == GLOBAL_ROWS // (2 * MICRO_ROWS)
    assert settings["train_batch_size"] == 2 * GLOBAL_ROWS
