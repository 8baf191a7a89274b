"""The Triton form against the formula: both outputs and every gradient, ragged rows, uninitialised memory."""

import pytest
import torch

from kernels import allocate
from kernels.add_norm.fused import add_rms_norm
from kernels.add_norm.reference import add_rms_norm_reference
from kernels.checks import is_interpreted
from tests.kernels.compare import assert_error_at_most_twice, assert_relative_error_below

DEVICE = "cpu" if is_interpreted() else "cuda"


def run(operator, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[-1])
    inputs = [torch.randn(sizes, generator=generator).half().to(DEVICE, dtype) for sizes in (shape, shape, shape[-1:])]
    for tensor in inputs:
        tensor.requires_grad_()
    outs = operator(*inputs, eps=1e-5)
    upstream = [torch.linspace(-1, 1, out.numel()).flip(0).view(out.shape).to(out) for out in outs]
    upstream[0] = upstream[0].square()
    return [*outs, *torch.autograd.grad(outs, inputs, upstream)]


@pytest.mark.parametrize("shape", [(1, 3), (2, 5, 96), (700, 80), (2, 2049)])
def test_fp32_equals_the_formula_in_outputs_and_gradients(shape, monkeypatch):
    """Sums of up to some thousand terms in another order."""

    def allocate_nan(*sizes, like, dtype=None):
        return torch.full(sizes, torch.nan, device=like.device, dtype=dtype or like.dtype)

    monkeypatch.setattr(allocate, "allocate", allocate_nan)
    pairs = zip(run(add_rms_norm, shape, torch.float32), run(add_rms_norm_reference, shape, torch.float32), strict=True)
    assert_relative_error_below(2**-17, **{str(i): pair for i, pair in enumerate(pairs)})


def test_fp16_errs_no_more_than_the_formula_does():
    dtypes = (
        (add_rms_norm, torch.float16),
        (add_rms_norm_reference, torch.float16),
        (add_rms_norm_reference, torch.float64),
    )
    triples = zip(*(run(operator, (9, 100), dtype) for operator, dtype in dtypes), strict=True)
    assert_error_at_most_twice(2**-10, **{str(i): triple for i, triple in enumerate(triples)})


def test_operator_passes_torchs_own_checks_of_custom_operators():
    x, added, weight = (torch.randn(sizes, device=DEVICE, requires_grad=True) for sizes in ((3, 8), (3, 8), (8,)))
    torch.library.opcheck(torch.ops.prism.add_rms_norm.default, (x, added, weight, 1e-5))


def test_other_shapes_and_fp64_are_refused_by_name():
    x = torch.ones(2, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"added\.shape"):
        add_rms_norm(x, x[:1], x[0], eps=1e-5)
    with pytest.raises(ValueError, match="add_rms_norm_reference"):
        add_rms_norm(x.double(), x.double(), x[0].double(), eps=1e-5)
