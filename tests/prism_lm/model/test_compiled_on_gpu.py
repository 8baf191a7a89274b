"""A PRISM block through the whole compiler, code generator included, on a CUDA device."""

import pytest
import torch

from tests.prism_lm.model.builders import SMALL, build_rows, build_small, relative_error

pytestmark = pytest.mark.gpu


def run(block, x_BTD, document_start_BT):
    """The output, then the gradients of the input and of every parameter."""
    out_BTD, _ = block(x_BTD, document_start_BT, None)
    return [out_BTD, *torch.autograd.grad(out_BTD.sin().sum(), [x_BTD, *block.parameters()])]


def test_generated_block_gives_the_same_output_and_gradients():
    """In fp32: the scan may err by 1e-5, and the layers about it reorder some ten products as long."""
    block = build_small(SMALL, dtype=torch.float32).blocks[0].cuda()
    document_start_BT = build_rows(2, 40, starts=((0, 13), (1, 20)))[1].cuda()
    x_BTD = torch.randn(2, 40, SMALL.model_width, generator=torch.Generator().manual_seed(6)).cuda().requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="inductor", fullgraph=True)
    pairs = zip(run(compiled, x_BTD, document_start_BT), run(block, x_BTD, document_start_BT), strict=True)
    assert max(relative_error(actual, expected) for actual, expected in pairs) < 1e-4
