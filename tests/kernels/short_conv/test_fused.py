"""The Triton convolution against the loop in fp64, in Triton's interpreter or on a GPU."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels import allocate
from kernels.short_conv import fused
from kernels.short_conv.fused import short_conv
from kernels.short_conv.reference import short_conv_reference
from kernels.short_conv.shifted import short_conv_shifted
from tests.kernels.compare import assert_error_at_most_twice, assert_relative_error_below
from tests.kernels.short_conv.cases import build_inputs, name_triples, run, widen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 8  # tokens a program in these tests: the interpreter is slow
# Sums of 8 products, and of 2 x 20 rows, in another order than the loop's.
FLOOR = 10 * torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def short_programs(monkeypatch):
    for name in ("FORWARD", "BACKWARD", "WIDE_BACKWARD"):
        monkeypatch.setattr(fused, name, getattr(fused, name)._replace(tokens=BLOCK))


def build(T=13, W=4, D=5, dtype=torch.float32):
    return build_inputs(T, W, D, dtype=dtype, device=DEVICE)


def assert_error_is_the_loops(tensors, start):
    truth = run(short_conv_reference, widen(tensors), start)
    reference = run(short_conv_reference, tensors, start)
    assert_error_at_most_twice(FLOOR, **name_triples(run(short_conv, tensors, start), reference, truth))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("T", "W"), [(1, 4), (3, 4), (7, 4), (8, 4), (9, 4), (20, 4), (1, 2), (17, 2), (8, 3), (4, 8), (7, 8), (18, 8)]
)
def test_results_and_gradients_equal_loop(T, W, packed):
    tensors, start = build(T, W)
    assert_error_is_the_loops(tensors, start if packed else None)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("T", [2, 17])
def test_row_without_entry_equals_loop(T, packed):
    tensors, start = build(T)
    assert_error_is_the_loops(tensors[:2], start if packed else None)


@pytest.mark.parametrize("D", [1, 64, 200])
def test_any_number_of_channels_equals_loop(D):
    assert_error_is_the_loops(*build(9, D=D))


def test_fp16_error_is_the_loops():
    assert_error_is_the_loops(*build(dtype=torch.float16))


def test_program_of_default_length_equals_loop(monkeypatch):
    monkeypatch.undo()
    assert_error_is_the_loops(*build(fused.FORWARD.tokens + 1))


def test_master_weight_in_fp32_keeps_its_dtype():
    (x_BTD, weight_DW, entry_BWD), start = build(dtype=torch.float16)
    out, _, _, grad_weight, _ = run(short_conv, [x_BTD, weight_DW.detach().float().requires_grad_(), entry_BWD], start)
    assert (out.dtype, grad_weight.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize("first", [True, False])
def test_every_token_a_document_uses_its_own_input_only(first):
    (x_BTD, weight_DW, entry_BWD), start = build(10)
    start = torch.ones_like(start)
    start[:, 0] = first
    tensors = [x_BTD, weight_DW, entry_BWD]
    assert_error_is_the_loops(tensors, start)
    assert (run(short_conv, tensors, start)[-1] == 0).all() == first


def test_another_documents_infinities_do_not_reach_a_document():
    (x_BTD, weight_DW, entry_BWD), start = build(10)
    start = torch.zeros_like(start)
    start[:, 4] = True
    clean = run(short_conv, [x_BTD, weight_DW, entry_BWD], start)
    broken_BTD = torch.where(torch.arange(10, device=DEVICE)[:, None] < 4, torch.inf, x_BTD.detach()).requires_grad_()
    broken = run(short_conv, [broken_BTD, weight_DW, entry_BWD], start)
    assert torch.equal(broken[0][:, 4:], clean[0][:, 4:]) and torch.equal(broken[1], clean[1])
    assert torch.equal(broken[2][:, 4:], clean[2][:, 4:])


@pytest.mark.parametrize("cut", [1, 2, 8, 11])
def test_row_cut_in_two_equals_whole_row(cut):
    (x_BTD, weight_DW, entry_BWD), start = build()
    whole, whole_window = short_conv(x_BTD, weight_DW, entry_BWD=entry_BWD, document_start_BT=start)
    left, window = short_conv(x_BTD[:, :cut], weight_DW, entry_BWD=entry_BWD, document_start_BT=start[:, :cut])
    right, window = short_conv(x_BTD[:, cut:], weight_DW, entry_BWD=window, document_start_BT=start[:, cut:])
    assert torch.equal(torch.cat([left, right], 1), whole) and torch.equal(window, whole_window)


def test_window_is_the_shifted_forms_and_keeps_no_input_alive():
    for T, W in ((1, 4), (2, 4), (3, 4), (9, 4), (9, 2), (3, 8)):
        tensors, start = build(T, W)
        for entry, documents in ((None, None), (None, start), (tensors[2], start), (tensors[2], None)):
            _, window = short_conv(*tensors[:2], entry_BWD=entry, document_start_BT=documents)
            _, expected = short_conv_shifted(*tensors[:2], entry_BWD=entry, document_start_BT=documents)
            assert torch.equal(window, expected) and window._base is None


def test_views_equal_contiguous_inputs():
    tensors, start = build()
    views = [
        torch.cat([tensors[0], tensors[0]], -1)[..., :5].detach().requires_grad_(),
        tensors[1].detach().t().contiguous().t().requires_grad_(),
        tensors[2].detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_(),
    ]
    view_start = start.t().contiguous().t()
    for actual, expected in zip(run(short_conv, views, view_start), run(short_conv, tensors, start), strict=True):
        assert torch.equal(actual, expected)


def test_every_result_is_written(monkeypatch):
    tensors, start = build(10)
    expected = run(short_conv, tensors, start)
    before = allocate.allocate
    monkeypatch.setattr(allocate, "allocate", lambda *sizes, **how: before(*sizes, **how).fill_(torch.nan))
    assert all(torch.equal(a, b) for a, b in zip(run(short_conv, tensors, start), expected, strict=True))


def test_unused_window_and_frozen_inputs_cost_no_gradient():
    (x_BTD, weight_DW, entry_BWD), start = build()
    expected = run(short_conv, [x_BTD, weight_DW, entry_BWD], start)
    out, window = short_conv(x_BTD.detach(), weight_DW, entry_BWD=entry_BWD.detach(), document_start_BT=start)
    (grad_weight,) = torch.autograd.grad(out.double().sin().sum(), weight_DW)
    assert torch.equal(grad_weight, expected[3]) and not window.requires_grad


def test_compiled_convolution_equals_eager():
    tensors, start = build()
    compiled = torch.compile(short_conv, backend="aot_eager", fullgraph=True)
    for documents in (None, start):
        for actual, expected in zip(
            run(compiled, tensors, documents), run(short_conv, tensors, documents), strict=True
        ):
            assert_relative_error_below(1e-6, result=(actual, expected))


def test_checkpointed_convolution_equals_eager():
    tensors, start = build()

    def recompute(x_BTD, weight_DW, **options):
        return checkpoint(short_conv, x_BTD, weight_DW, use_reentrant=False, **options)

    actual, expected = run(recompute, tensors, start), run(short_conv, tensors, start)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_operator_registration_passes_torchs_own_check():
    (x_BTD, weight_DW, entry_BWD), start = build(3, D=2)
    for arguments in ((x_BTD, weight_DW, entry_BWD, start), (x_BTD, weight_DW, None, None)):
        torch.library.opcheck(torch.ops.prism.short_conv.default, arguments)
        torch.library.opcheck(
            torch.ops.prism.short_conv_backward.default,
            tuple(None if a is None else a.detach() for a in (x_BTD, *arguments)),
        )


def test_second_derivative_is_refused():
    (x_BTD, weight_DW, _), _ = build(3, D=2)
    out, _ = short_conv(x_BTD, weight_DW)
    (grad,) = torch.autograd.grad(out.square().sum(), x_BTD, create_graph=True)
    with pytest.raises(RuntimeError, match="short_conv_backward"):
        torch.autograd.grad(grad.sum(), x_BTD)


def test_what_the_kernel_cannot_do_is_refused_by_name(monkeypatch):
    (x_BTD, weight_DW, _), _ = build(3)
    with pytest.raises(ValueError, match=r"x_BTD.dtype=torch.float64 must be one of .*, or call short_conv_shifted"):
        short_conv(x_BTD.double(), weight_DW.double())
    with pytest.raises(ValueError, match=r"weight_DW.dtype=torch.float64 must be one of .*short_conv_shifted"):
        short_conv(x_BTD, weight_DW.double())
    for W in (1, 9):
        rule = rf"weight_DW.shape\[1\]={W} must be from 2 to 8; change it, or call short_conv_shifted"
        with pytest.raises(ValueError, match=rule):
            short_conv(x_BTD, x_BTD.new_ones(5, W))
    monkeypatch.setattr("kernels.checks.is_interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"x_BTD.device=cpu must be the CUDA device .*short_conv_shifted"):
        short_conv(x_BTD.cpu(), weight_DW.cpu())
