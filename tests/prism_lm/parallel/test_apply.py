"""Checkpointed and compiled blocks compute what plain blocks compute."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from prism_lm.model.config import ModelConfig
from prism_lm.parallel.apply import ParallelConfig, apply_to_blocks, check_alignment, check_mixers
from tests.harness import TinyModel, assert_error_within, build_batch


def compute_gradients(config: ParallelConfig) -> tuple[dict[str, Tensor], int]:
    """Gradients by name, and how often the first block's norm ran."""
    torch.manual_seed(0)
    model = TinyModel()
    runs = 0

    def count(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal runs
        runs += 1

    if not config.compile:
        model.blocks[0].norm.register_forward_hook(count)
    apply_to_blocks(model, config)
    model(**build_batch(4, seed=1)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, runs


@pytest.mark.parametrize(
    "config",
    [
        ParallelConfig(activation_checkpointing=True),
        ParallelConfig(activation_checkpointing=True, compile=True),
    ],
    ids=["checkpointing", "both"],
)
def test_gradients_and_names_are_those_of_the_plain_model(config: ParallelConfig) -> None:
    plain, _ = compute_gradients(ParallelConfig())
    changed, _ = compute_gradients(config)
    assert changed.keys() == plain.keys()
    for name, gradient in plain.items():
        # Checkpointing repeats the same operations; compiled code sums some hundred fp32 terms in another order.
        assert_error_within(changed[name], gradient, 2**-20 if config.compile else 0.0, what=name)


def test_checkpointing_runs_a_block_again_in_backward() -> None:
    assert compute_gradients(ParallelConfig())[1] == 1
    assert compute_gradients(ParallelConfig(activation_checkpointing=True))[1] == 2


def test_model_without_blocks_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"Linear has no nn\.ModuleList `blocks`"):
        apply_to_blocks(nn.Linear(2, 2), ParallelConfig(compile=True))


@pytest.mark.parametrize(("width", "bytes_each", "is_refused"), [(8, 2, False), (12, 2, True), (12, 4, False)])
def test_weights_that_end_off_16_bytes_are_refused_for_compiled_blocks(width, bytes_each, is_refused) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.LayerNorm(width)])
    refused = pytest.raises(ValueError, match=r"multiple of 8 elements, not weight of shape \(12,\)")
    with refused if is_refused else nullcontext():
        check_alignment(model, bytes_each=bytes_each)


def test_cut_rows_are_refused_for_a_mixer_that_reads_them_whole() -> None:
    hybrid = ModelConfig(num_layers=2, layer_pattern=["prism", "ttt"])
    check_mixers(hybrid, 1)
    check_mixers(ModelConfig(mixer="linear_attention"), 2)
    message = "^--sequence-degree=2 must be 1 for model.mixer=ttt, .*; use --sequence-degree=1$"
    with pytest.raises(ValueError, match=message):
        check_mixers(hybrid, 2, key="--sequence-degree")
