"""The Triton form against the formula: output and gradient, widths around the block, uninitialised memory."""

import pytest
import torch

from kernels import allocate
from kernels.checks import is_interpreted
from kernels.swiglu.fused import swiglu
from kernels.swiglu.reference import swiglu_reference
from tests.kernels.compare import assert_error_at_most_twice, assert_relative_error_below

DEVICE = "cpu" if is_interpreted() else "cuda"


def run(operator, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]), dtype=torch.float64)
    gate_up = gate_up.to(torch.float16).to(DEVICE, dtype).requires_grad_()
    out = operator(gate_up)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
    return out, torch.autograd.grad(out, gate_up, weights)[0]


@pytest.mark.parametrize("shape", [(1, 2), (2, 5, 96), (9, 510), (3, 512), (2, 4, 514), (0, 4)])
def test_fp32_equals_the_formula_in_output_and_gradient(shape, monkeypatch):
    """A handful of roundings of 2^-24 each."""

    def allocate_nan(*sizes, like, dtype=None):
        return torch.full(sizes, torch.nan, device=like.device, dtype=dtype or like.dtype)

    monkeypatch.setattr(allocate, "allocate", allocate_nan)
    pairs = zip(run(swiglu, shape, torch.float32), run(swiglu_reference, shape, torch.float32), strict=True)
    assert_relative_error_below(2**-20, **{str(i): pair for i, pair in enumerate(pairs)})


def test_fp16_errs_no_more_than_the_formula_does():
    dtypes = ((swiglu, torch.float16), (swiglu_reference, torch.float16), (swiglu_reference, torch.float64))
    triples = zip(*(run(operator, (5, 100), dtype) for operator, dtype in dtypes), strict=True)
    assert_error_at_most_twice(2**-11, **{str(i): triple for i, triple in enumerate(triples)})


def test_operator_passes_torchs_own_checks_of_custom_operators():
    torch.library.opcheck(torch.ops.prism.swiglu.default, (torch.randn(3, 8, device=DEVICE, requires_grad=True),))


def test_odd_width_and_fp64_are_refused_by_name():
    with pytest.raises(ValueError, match="must end in an even width"):
        swiglu(torch.ones(2, 3, device=DEVICE))
    with pytest.raises(ValueError, match="swiglu_reference"):
        swiglu(torch.ones(2, 4, dtype=torch.float64, device=DEVICE))
