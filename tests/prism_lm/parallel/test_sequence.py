"""Mixers and models on shards over processes against one process: outputs, states, loss and every gradient, fp64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.prism.reference import prism_scan_reference
from prism_lm.model.config import ModelConfig
from prism_lm.model.decode_state import LayerState
from prism_lm.model.lm import LanguageModel
from prism_lm.model.operators import build_plain_operators
from prism_lm.parallel.apply import ParallelConfig, apply_to_blocks
from prism_lm.parallel.collectives import sum_tensor
from prism_lm.parallel.mesh import process_group
from prism_lm.parallel.sequence import SequenceGroup, shard_operators
from tests.harness import read_ranks, run_on
from tests.prism_lm.model.builders import FAMILIES, SMALL, build_rows, build_small
from tests.prism_lm.parallel.shards import ReplayGroup, build_starts, take_slice

ONE_LAYER = {
    name: replace(FAMILIES[name], num_layers=1, conv_width=5)
    for name in ("prism", "gated_delta", "linear_attention", "attention")
}
HYBRID = FAMILIES["hybrid"]


def build_pair(config: ModelConfig, group: SequenceGroup) -> tuple[LanguageModel, LanguageModel]:
    """The same weights on whole rows and on shards."""
    whole = build_small(config)
    sharded = LanguageModel(config, operators=shard_operators(build_plain_operators(), group)).double()
    sharded.load_state_dict(whole.state_dict())
    return whole, sharded


def read_gradients(module: nn.Module) -> dict[str, Tensor]:
    return {f"grad of {name}": parameter.grad for name, parameter in module.named_parameters()}


def list_states(state: LayerState) -> dict[str, Tensor]:
    return {f"state {place}": tensor for place, tensor in enumerate(state) if tensor is not None}


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each tensor over its largest magnitude."""
    return {name: measure_error(actual[name].double(), tensor.double()) for name, tensor in expected.items()}


def measure_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()


def compare_mixer(config: ModelConfig, num_tokens: int, group: SequenceGroup) -> dict[str, float]:
    """A row that begins and one that continues it."""
    whole, sharded = (model.blocks[0].mixer for model in build_pair(config, group))
    start_BT = build_starts(group.count, num_tokens)
    generator = torch.Generator().manual_seed(8)
    errors: dict[str, float] = {}
    state = None
    for row in ("first", "next"):
        x_BTD = torch.randn(*start_BT.shape, SMALL.model_width, generator=generator, dtype=torch.float64)
        x_BTD.requires_grad_()
        expected_BTD, new_state = whole(x_BTD, start_BT, state)
        expected_BTD.sin().sum().backward()
        own_BTD = take_slice(x_BTD, group).detach().requires_grad_()
        out_BTD, own_state = sharded(own_BTD, take_slice(start_BT, group), state)
        out_BTD.sin().sum().backward()
        actual = {"out": out_BTD, "grad of x": own_BTD.grad, **list_states(own_state)}
        expected = {"out": expected_BTD, "grad of x": x_BTD.grad}
        expected = {name: take_slice(tensor, group) for name, tensor in expected.items()} | list_states(new_state)
        actual |= {name: sum_tensor(grad) for name, grad in read_gradients(sharded).items()}
        found = compare(actual, expected | read_gradients(whole))
        errors |= {f"{row} row, {name}": error for name, error in found.items()}
        state = new_state
    return errors


def compare_model(
    change: Callable[[LanguageModel], None], config: ModelConfig, num_tokens: int, group: SequenceGroup
) -> dict[str, float]:
    """Summed loss and every gradient; each shard has labels of its own number, the last one none."""
    whole, sharded = build_pair(config, group)
    change(sharded)
    start_BT = build_starts(group.count, num_tokens)
    ids_BT, _, labels_BT = build_rows(*start_BT.shape)
    labels_BT[torch.rand(labels_BT.shape, generator=torch.Generator().manual_seed(2)) < 0.3] = -100
    labels_BT[:, -num_tokens:] = -100
    expected = whole(ids_BT, start_BT, labels_BT)
    loss = sharded(*(take_slice(tensor, group) for tensor in (ids_BT, start_BT, labels_BT)))
    for total in (expected, loss):
        total.backward()
    gradients = {name: sum_tensor(grad) for name, grad in read_gradients(sharded).items()}
    return compare({"loss": sum_tensor(loss), **gradients}, {"loss": expected, **read_gradients(whole)})


def compare_gathers(group: SequenceGroup) -> dict[str, float]:
    """Booleans, a strided payload, and sums that bf16 alone would lose."""
    mine = torch.arange(6.0).view(2, 3).t() + group.index
    stacked = torch.stack([torch.arange(6.0).view(2, 3).t() + place for place in range(group.count)])
    small = torch.full((group.count, 2), 1.0 + 255 * (group.index == 0), dtype=torch.bfloat16)
    total = torch.full((2,), 255.0 + group.count).bfloat16()
    wait = group.start_gather(mine > 3)
    actual = {"values": group.gather(mine), "flags": wait(), "sums": group.sum_own(small)}
    return compare(actual, {"values": stacked, "flags": stacked > 3, "sums": total})


def leave(model: LanguageModel) -> None:
    """The model as it is."""


def checkpoint_blocks(model: LanguageModel) -> None:
    apply_to_blocks(model, ParallelConfig(activation_checkpointing=True))


def compile_and_checkpoint_blocks(model: LanguageModel) -> None:
    """By the compiler's front half, in as many graphs as the exchanges cut."""
    for block in model.blocks:
        compiled = torch.compile(block.forward, backend="aot_eager")
        block.forward = partial(checkpoint, compiled, use_reentrant=False)


def measure() -> dict[str, dict[str, float]]:
    """Errors by case and tensor."""
    with process_group(read_ranks()):
        group = SequenceGroup(dist.group.WORLD)
        errors = {name: compare_mixer(config, 9, group) for name, config in ONE_LAYER.items()}
        errors["prism_of_single_tokens"] = compare_mixer(ONE_LAYER["prism"], 1, group)
        for name, change in CHANGES.items():
            errors[name] = compare_model(change, HYBRID, 20, group)
        errors["gathers"] = compare_gathers(group)
        return errors


def measure_compiled() -> dict[str, float]:
    with process_group(read_ranks()):
        return compare_model(compile_and_checkpoint_blocks, HYBRID, 20, SequenceGroup(dist.group.WORLD))


CHANGES = {"model": leave, "checkpointed_model": checkpoint_blocks}
CASES = [*ONE_LAYER, "prism_of_single_tokens", *CHANGES, "gathers"]


@pytest.fixture(scope="module", params=[2, 4])
def errors(request: pytest.FixtureRequest) -> list[dict[str, dict[str, float]]]:
    return run_on(request.param, measure)


def assert_all_below(errors: dict[str, float], bound: float) -> None:
    assert len(errors) >= 3
    assert not {name: error for name, error in errors.items() if not error < bound}


@pytest.mark.parametrize("case", CASES)
def test_shards_over_processes_equal_one_process_in_everything(case, errors):
    for found in errors:
        assert_all_below(found[case], 1e-9)


def test_compiled_and_checkpointed_shards_equal_one_process():
    for found in run_on(2, measure_compiled):
        assert_all_below(found, 1e-9)


def test_group_of_one_process_keeps_the_operators_of_whole_rows():
    operators = build_plain_operators()
    assert shard_operators(operators, ReplayGroup(0, 1, [])) is operators


def test_scan_without_a_form_for_shards_is_refused_by_name():
    operators = replace(build_plain_operators(), scan=prism_scan_reference)
    with pytest.raises(ValueError, match=r"scan=prism_scan_reference must be .* prism_scan_chunked or prism_scan"):
        shard_operators(operators, ReplayGroup(0, 2, []))
