"""The bundle of operators: one signature in both forms; a block computes the same with either."""

import inspect
from dataclasses import fields, replace

import pytest
import torch

from kernels.checks import is_interpreted
from prism_lm.model.block import Block
from prism_lm.model.kernels import build_triton_operators
from prism_lm.model.operators import Operators, build_plain_operators
from tests.prism_lm.model.builders import FAMILIES, SMALL, build_rows, build_small, relative_error

STARTS = ((0, 13), (1, 16))
ROWS, TOKENS = 2, 20
needs_interpreter = pytest.mark.skipif(not is_interpreted(), reason="on a GPU test_kernels_on_gpu.py says this")


def read_parameters(operator) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(operator).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


def build_blocks(config) -> tuple[Block, Block]:
    """One block of the same fp32 weights on either form."""
    plain = build_small(replace(config, num_layers=1), dtype=torch.float32).blocks[0]
    fused = Block(config, config.mixer, operators=build_triton_operators())
    fused.load_state_dict(plain.state_dict())
    return plain, fused


def run(block, forward=None) -> list[torch.Tensor]:
    """The output, then the gradients of the input and of every parameter."""
    generator = torch.Generator().manual_seed(6)
    x_BTD = torch.randn(ROWS, TOKENS, SMALL.model_width, generator=generator).requires_grad_()
    out_BTD, _ = (forward or block)(x_BTD, build_rows(ROWS, TOKENS, starts=STARTS)[1], None)
    return [out_BTD, *torch.autograd.grad(out_BTD.sin().sum(), [x_BTD, *block.parameters()])]


@pytest.mark.parametrize("name", [field.name for field in fields(Operators)])
def test_both_forms_of_an_operator_take_the_same_arguments(name):
    """The Triton form may take further ones, which are left out by default. Attention is torch's own in both."""
    plain, fused = (getattr(build(), name) for build in (build_plain_operators, build_triton_operators))
    expected, actual = read_parameters(plain), read_parameters(fused)
    assert actual[: len(expected)] == expected and (plain is not fused or name == "attention")
    assert all(default is None for _, _, default in actual[len(expected) :])


@needs_interpreter
@pytest.mark.parametrize("family", ["prism", "gated_delta", "linear_attention"])
def test_block_on_triton_equals_the_plain_block_in_output_and_every_gradient(family):
    """In fp32: each operator is right to 1e-5, and the layers about them reorder some ten sums as long."""
    plain, fused = build_blocks(FAMILIES[family])
    for actual, expected in zip(run(fused), run(plain), strict=True):
        assert relative_error(actual, expected) < 1e-4


@needs_interpreter
def test_block_on_triton_compiles_to_one_graph_with_the_same_gradients():
    """The operators are opaque to the compiler, whose own code is one block's elementwise work in fp32."""
    _, fused = build_blocks(SMALL)
    torch._dynamo.reset()
    compiled = torch.compile(fused.forward, backend="aot_eager_decomp_partition", fullgraph=True)
    for actual, expected in zip(run(fused, compiled), run(fused), strict=True):
        assert relative_error(actual, expected) < 1e-5


@needs_interpreter
@torch.no_grad()
def test_cut_row_on_triton_equals_the_whole_row_through_single_steps():
    """A prefill, single steps and a rest, across a document start."""
    _, fused = build_blocks(SMALL)
    x_BTD = torch.randn(ROWS, TOKENS, SMALL.model_width, generator=torch.Generator().manual_seed(7))
    start_BT = build_rows(ROWS, TOKENS, starts=STARTS)[1]
    whole_BTD, _ = fused(x_BTD, start_BT, None)
    state, parts = None, []
    for first, last in [(0, 11), *((token, token + 1) for token in range(11, 15)), (15, TOKENS)]:
        part, state = fused(x_BTD[:, first:last], start_BT[:, first:last], state)
        parts.append(part)
    assert relative_error(torch.cat(parts, 1), whole_BTD) < 1e-5
