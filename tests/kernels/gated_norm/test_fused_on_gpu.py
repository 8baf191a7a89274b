"""The compiled norm on a CUDA device: dtypes, large shapes, repeatability, the compiler."""

import pytest
import torch

from kernels.gated_norm.explicit import gated_rms_norm_explicit
from kernels.gated_norm.fused import gated_rms_norm
from kernels.gated_norm.reference import gated_rms_norm_reference
from tests.kernels.compare import assert_error_at_most_twice, assert_relative_error_below

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# The gradient of the weight is a sum of up to 2^19 rows in another order: sqrt(2^19) / 16 roundings.
FLOOR = 45 * torch.finfo(torch.float32).eps


def build_inputs(*sizes, dtype):
    generator = torch.Generator("cuda").manual_seed(sizes[-1])
    x, gate = (torch.randn(*sizes, generator=generator, device="cuda").to(dtype) for _ in range(2))
    weight_V = (torch.rand(sizes[-1], generator=generator, device="cuda") + 0.5).to(dtype)
    return [tensor.requires_grad_() for tensor in (x, gate, weight_V)]


def run(norm, tensors):
    out = norm(*tensors, eps=1e-6)
    return [out, *torch.autograd.grad(out.double().sin().sum(), tensors)]


def assert_error_is_that_of(plain, tensors):
    truth = run(plain, [x.detach().double().requires_grad_() for x in tensors])
    results = zip(run(gated_rms_norm, tensors), run(plain, tensors), truth, strict=True)
    assert_error_at_most_twice(FLOOR, **dict(zip(("out", "grad_x", "grad_gate", "grad_weight"), results, strict=True)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 24, 32, 64, 100, 128, 256, 300, 512, 1024])
def test_error_is_the_formulas_at_every_width(V, dtype):
    assert_error_is_that_of(gated_rms_norm_reference, build_inputs(777, V, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_the_explicit_forms_at_training_shapes(dtype):
    assert_error_is_that_of(gated_rms_norm_explicit, build_inputs(1, 32768, 16, 128, dtype=dtype))


def test_hundred_runs_are_bit_equal():
    tensors = build_inputs(8192, 16, 128, dtype=torch.bfloat16)
    expected = run(gated_rms_norm, tensors)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(run(gated_rms_norm, tensors), expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_inductor_equals_eager(dtype):
    tensors = build_inputs(300, 3, 128, dtype=dtype)
    compiled = torch.compile(gated_rms_norm, fullgraph=True)
    for actual, expected in zip(run(compiled, tensors), run(gated_rms_norm, tensors), strict=True):
        assert_relative_error_below(2 * torch.finfo(dtype).eps, result=(actual, expected))


def test_offsets_beyond_32_bits_are_right():
    """2^31 elements and a few rows more, in bf16: 4 GiB a tensor. The last rows equal those of a norm of their own."""
    V, tail = 128, 100
    N = 2**31 // V + tail
    x, gate = (torch.randn(N, V, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    weight_V = torch.rand(V, device="cuda").requires_grad_()
    out = gated_rms_norm(x, gate, weight_V, eps=1e-6)
    seed = torch.zeros_like(out)
    seed[-tail:] = torch.randn(tail, V, device="cuda", dtype=torch.bfloat16)
    actual = torch.autograd.grad(out, (x, gate, weight_V), seed)
    tensors = [x[-tail:].detach().requires_grad_(), gate[-tail:].detach().requires_grad_(), weight_V]
    expected = gated_rms_norm(*tensors, eps=1e-6)
    grads = torch.autograd.grad(expected, tensors, seed[-tail:])
    assert torch.equal(out[-tail:], expected)
    assert all(torch.equal(a[-tail:], b) and not a[:-tail].any() for a, b in zip(actual[:2], grads[:2], strict=True))
    assert_relative_error_below(1e-5, grad_weight=(actual[2], grads[2]))
