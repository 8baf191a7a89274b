"""The norm with its own backward against the formula."""

import pytest
import torch

from kernels.gated_norm.explicit import gated_rms_norm_explicit
from kernels.gated_norm.reference import gated_rms_norm_reference
from tests.kernels.compare import assert_error_at_most_twice, assert_relative_error_below


def build_inputs(dtype, V=16):
    generator = torch.Generator().manual_seed(V)
    x, gate = (torch.randn(2, 7, 3, V, generator=generator, dtype=torch.float64) for _ in range(2))
    weight_V = torch.rand(V, generator=generator, dtype=torch.float64) + 0.5
    return [tensor.to(dtype).requires_grad_() for tensor in (x, gate, weight_V)]


def run(norm, tensors):
    out = norm(*tensors, eps=1e-6)
    return [out, *torch.autograd.grad(out.double().sin().sum(), tensors)]


def test_output_and_gradients_equal_formula():
    tensors = build_inputs(torch.float64)
    for actual, expected in zip(
        run(gated_rms_norm_explicit, tensors), run(gated_rms_norm_reference, tensors), strict=True
    ):
        assert_relative_error_below(1e-13, result=(actual, expected))


def test_gradients_pass_gradcheck():
    tensors = [x.detach().flatten()[:6].clone().requires_grad_() for x in build_inputs(torch.float64)]
    assert torch.autograd.gradcheck(
        lambda x, gate, weight: gated_rms_norm_explicit(x.view(2, 3), gate.view(2, 3), weight[:3], eps=1e-6), tensors
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_error_is_the_formulas(dtype):
    """Both compute in fp32; sums of 16 and 42 terms in another order lose at most ten fp32 roundings."""
    tensors = build_inputs(dtype)
    truth = run(gated_rms_norm_reference, [x.detach().double().requires_grad_() for x in tensors])
    results = zip(run(gated_rms_norm_explicit, tensors), run(gated_rms_norm_reference, tensors), truth, strict=True)
    triples = dict(zip(("out", "grad_x", "grad_gate", "grad_weight"), results, strict=True))
    assert_error_at_most_twice(10 * torch.finfo(torch.float32).eps, **triples)


def test_zero_rows_give_zero_and_finite_gradients():
    tensors = [torch.zeros(2, 8, requires_grad=True), torch.ones(2, 8, requires_grad=True), torch.ones(8)]
    tensors[2].requires_grad_()
    out, *grads = run(gated_rms_norm_explicit, tensors)
    assert (out == 0).all() and all(torch.isfinite(grad).all() for grad in grads)


def test_compiled_norm_equals_eager():
    tensors = build_inputs(torch.float32)
    compiled = torch.compile(gated_rms_norm_explicit, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(run(compiled, tensors), run(gated_rms_norm_explicit, tensors), strict=True):
        assert_relative_error_below(1e-6, result=(actual, expected))
