"""The sum of shifted copies against the loop."""

import pytest
import torch

from kernels.short_conv.reference import short_conv_reference
from kernels.short_conv.shifted import short_conv_shifted
from tests.kernels.compare import assert_error_at_most_twice, assert_relative_error_below


def build_inputs(T=20, W=4, packed=True, dtype=torch.float64):
    generator = torch.Generator().manual_seed(T + W)
    sizes = ((2, T, 5), (5, W), (2, W - 1, 5))
    tensors = [torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    start = torch.zeros(2, T, dtype=torch.bool)
    start[0, [t for t in (0, 7, 8, 15, 19) if t < T]] = True
    start[1, [t for t in (2, 17) if t < T]] = True
    return [x.requires_grad_() for x in tensors], start if packed else None


def run(conv, tensors, start):
    x_BTD, weight_DW, entry_BWD = tensors
    out, window = conv(x_BTD, weight_DW, entry_BWD=entry_BWD, document_start_BT=start)
    loss = out.double().sin().sum() + window.double().square().sum()
    return [out, window, *torch.autograd.grad(loss, tensors, allow_unused=True)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("T", "W"), [(20, 4), (1, 4), (2, 4), (3, 4), (20, 2), (20, 1)])
def test_output_window_and_gradients_equal_loop(T, W, packed):
    tensors, start = build_inputs(T, W, packed)
    actual, expected = run(short_conv_shifted, tensors, start), run(short_conv_reference, tensors, start)
    for name, a, b in zip(("out", "window", "grad_x", "grad_weight", "grad_entry"), actual, expected, strict=True):
        if b is not None and b.numel():
            assert_relative_error_below(1e-13, **{name: (a, b)})


@pytest.mark.parametrize("cut", [1, 2, 8, 18])
def test_row_cut_in_two_equals_whole_row(cut):
    (x_BTD, weight_DW, entry_BWD), start = build_inputs()
    whole, whole_window = short_conv_shifted(x_BTD, weight_DW, entry_BWD=entry_BWD, document_start_BT=start)
    left, window = short_conv_shifted(x_BTD[:, :cut], weight_DW, entry_BWD=entry_BWD, document_start_BT=start[:, :cut])
    right, window = short_conv_shifted(x_BTD[:, cut:], weight_DW, entry_BWD=window, document_start_BT=start[:, cut:])
    assert_relative_error_below(1e-14, out=(torch.cat([left, right], 1), whole), window=(window, whole_window))


def test_gradients_pass_gradcheck():
    tensors, start = build_inputs(5)
    assert torch.autograd.gradcheck(
        lambda x, weight, entry: short_conv_shifted(x, weight, entry_BWD=entry, document_start_BT=start), tensors
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_error_is_the_loops(dtype):
    """Sums of 4 products and of 40 rows in another order: ten roundings of the result's dtype bound the difference."""
    tensors, start = build_inputs(dtype=dtype)
    truth = run(short_conv_reference, [x.detach().double().requires_grad_() for x in tensors], start)
    results = zip(
        run(short_conv_shifted, tensors, start), run(short_conv_reference, tensors, start), truth, strict=True
    )
    triples = dict(zip(("out", "window", "grad_x", "grad_weight", "grad_entry"), results, strict=True))
    assert_error_at_most_twice(10 * torch.finfo(torch.float32).eps, **triples)


def test_compiled_convolution_equals_eager():
    tensors, start = build_inputs(dtype=torch.float32)
    compiled = torch.compile(short_conv_shifted, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(run(compiled, tensors, start), run(short_conv_shifted, tensors, start), strict=True):
        assert_relative_error_below(1e-6, result=(actual, expected))


def test_uninitialised_memory_is_never_read():
    tensors, start = build_inputs(dtype=torch.float32)
    expected = run(short_conv_shifted, tensors, start)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        actual = run(short_conv_shifted, tensors, start)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
