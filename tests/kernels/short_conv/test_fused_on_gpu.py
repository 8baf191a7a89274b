"""The compiled convolution on a CUDA device: dtypes, large shapes, repeatability, the compiler."""

import pytest
import torch

from kernels.short_conv.fused import FORWARD, MAX_WIDTH, MIN_WIDTH, short_conv
from kernels.short_conv.reference import short_conv_reference
from kernels.short_conv.shifted import short_conv_shifted
from tests.kernels.compare import assert_error_at_most_twice, assert_relative_error_below
from tests.kernels.short_conv.cases import build_inputs, name_triples, run, widen

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# The shifted form sums the gradient of the weight in another order: of up to 2^15 terms, sqrt(2^15) / 8 roundings.
FLOOR = 32 * torch.finfo(torch.float32).eps
# The loop adds up the gradient of the entry in 16 bits and the kernel in fp32, so that they round independently: of a
# few numbers either may be lucky, and only of many is the ratio of their errors a property of the kernel.
MIN_SAMPLES = 256  # rows x channels


def build(T, W, D, dtype, B=2):
    return build_inputs(T, W, D, dtype=dtype, B=B, device="cuda", start_every=50)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("W", range(MIN_WIDTH, MAX_WIDTH + 1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_the_loops_at_every_width_of_the_window(dtype, W, packed):
    tensors, start = build(2 * FORWARD.tokens + 3, W, 72, dtype)
    start = start if packed else None
    truth = run(short_conv_reference, widen(tensors), start)
    reference = run(short_conv_reference, tensors, start)
    assert_error_at_most_twice(FLOOR, **name_triples(run(short_conv, tensors, start), reference, truth))


@pytest.mark.parametrize("T", [1, 3, FORWARD.tokens - 1, FORWARD.tokens, FORWARD.tokens + 1, 500])
@pytest.mark.parametrize("D", [1, 24, 100, 520])
def test_error_is_the_loops_at_every_length_and_alignment(D, T):
    tensors, start = build(T, 4, D, torch.bfloat16, B=max(2, MIN_SAMPLES // D))
    truth = run(short_conv_reference, widen(tensors), start)
    reference = run(short_conv_reference, tensors, start)
    assert_error_at_most_twice(FLOOR, **name_triples(run(short_conv, tensors, start), reference, truth))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "T"), [(1, 32768), (8, 4096)])
def test_error_is_the_shifted_forms_at_training_shapes(B, T, dtype):
    tensors, start = build(T, 4, 1024, dtype, B=B)
    truth = run(short_conv_shifted, widen(tensors), start)
    reference = run(short_conv_shifted, tensors, start)
    assert_error_at_most_twice(FLOOR, **name_triples(run(short_conv, tensors, start), reference, truth))


def test_hundred_runs_are_bit_equal():
    tensors, start = build(4096, 4, 2048, torch.bfloat16)
    expected = run(short_conv, tensors, start)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(run(short_conv, tensors, start), expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_inductor_equals_eager(dtype):
    tensors, start = build(300, 4, 96, dtype)
    compiled = torch.compile(short_conv, fullgraph=True)
    limit = 2 * torch.finfo(dtype).eps
    for documents in (None, start):
        for actual, expected in zip(
            run(compiled, tensors, documents), run(short_conv, tensors, documents), strict=True
        ):
            assert_relative_error_below(limit, result=(actual, expected))


def test_offsets_beyond_32_bits_are_right():
    """2^31 elements and a few rows more, in bf16: 4 GiB a tensor. The last tokens equal a row of their own."""
    D, W, tail = 2048, 4, 100
    T = 2**31 // D + tail
    x_BTD = torch.randn(1, T, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight_DW = torch.randn(D, W, device="cuda", dtype=torch.bfloat16).requires_grad_()
    out, _ = short_conv(x_BTD, weight_DW)
    seed_BTD = torch.zeros_like(out)
    seed_BTD[:, -tail:] = torch.randn(1, tail, D, device="cuda", dtype=torch.bfloat16)
    grad_x, grad_weight = torch.autograd.grad(out, (x_BTD, weight_DW), seed_BTD)
    entry_BWD = x_BTD[:, -tail - W + 1 : -tail].detach().requires_grad_()
    tail_BTD = x_BTD[:, -tail:].detach().requires_grad_()
    expected, _ = short_conv(tail_BTD, weight_DW, entry_BWD=entry_BWD)
    grads = torch.autograd.grad(expected, (tail_BTD, weight_DW, entry_BWD), seed_BTD[:, -tail:])
    assert torch.equal(out[:, -tail:], expected) and torch.equal(grad_x[:, -tail:], grads[0])
    assert torch.equal(grad_x[:, -tail - W + 1 : -tail], grads[2]) and not grad_x[:, : -tail - W + 1].any()
    assert_relative_error_below(2 * torch.finfo(torch.bfloat16).eps, grad_weight=(grad_weight, grads[1]))
