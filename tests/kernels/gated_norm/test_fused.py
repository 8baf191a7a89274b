"""The Triton norm against the formula in fp64, in Triton's interpreter or on a GPU."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels import allocate
from kernels.gated_norm import fused
from kernels.gated_norm.fused import gated_rms_norm
from kernels.gated_norm.reference import gated_rms_norm_reference
from tests.kernels.compare import assert_error_at_most_twice, assert_relative_error_below

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 64  # elements of a tile in these tests: the interpreter is slow
# Sums of up to 1024 columns and 40 rows in another order than the formula's.
FLOOR = 10 * torch.finfo(torch.float32).eps
RESULTS = ("out", "grad_x", "grad_gate", "grad_weight")


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    monkeypatch.setattr(fused, "BLOCK_ELEMENTS", BLOCK)
    monkeypatch.setattr(fused, "TILES", 2)


def build_inputs(*sizes, dtype=torch.float32):
    generator = torch.Generator(DEVICE).manual_seed(sizes[-1])
    x, gate = (torch.randn(*sizes, generator=generator, device=DEVICE).to(dtype) for _ in range(2))
    weight_V = (torch.rand(sizes[-1], generator=generator, device=DEVICE) + 0.5).to(dtype)
    return [tensor.requires_grad_() for tensor in (x, gate, weight_V)]


def run(norm, tensors):
    out = norm(*tensors, eps=1e-6)
    return [out, *torch.autograd.grad(out.double().sin().sum(), tensors)]


def assert_error_is_the_formulas(tensors):
    truth = run(gated_rms_norm_reference, [x.detach().double().requires_grad_() for x in tensors])
    results = zip(run(gated_rms_norm, tensors), run(gated_rms_norm_reference, tensors), truth, strict=True)
    assert_error_at_most_twice(FLOOR, **dict(zip(RESULTS, results, strict=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 7, 8, 9, 40])
def test_any_number_of_rows_equals_formula(rows, dtype):
    assert_error_is_the_formulas(build_inputs(rows, 16, dtype=dtype))


@pytest.mark.parametrize("V", [1, 2, 5, 31, 32, 100, 128, 600, 1024])
def test_any_width_equals_formula(V):
    assert_error_is_the_formulas(build_inputs(3, V))


def test_leading_dims_are_kept():
    tensors = build_inputs(2, 3, 4, 8)
    assert_error_is_the_formulas(tensors)
    assert gated_rms_norm(*tensors, eps=1e-6).shape == (2, 3, 4, 8)
    assert gated_rms_norm(*build_inputs(8), eps=1e-6).shape == (8,)


def test_no_rows_give_no_output_and_no_gradient():
    out, grad_x, _, grad_weight = run(gated_rms_norm, build_inputs(0, 8))
    assert out.shape == grad_x.shape == (0, 8) and (grad_weight == 0).all()


def test_program_of_default_size_equals_formula(monkeypatch):
    monkeypatch.undo()
    rows = fused.TILES * fused.BLOCK_ELEMENTS // 128
    assert_error_is_the_formulas(build_inputs(rows + 1, 128))


def test_zero_rows_give_zero_and_finite_gradients():
    tensors = [torch.zeros(2, 8), torch.ones(2, 8), torch.ones(8)]
    out, *grads = run(gated_rms_norm, [tensor.to(DEVICE).requires_grad_() for tensor in tensors])
    assert (out == 0).all() and all(torch.isfinite(grad).all() for grad in grads)


def test_every_tensor_keeps_its_dtype():
    x, gate, weight_V = build_inputs(4, 8, dtype=torch.float16)
    tensors = [x, gate.detach().float().requires_grad_(), weight_V.detach().float().requires_grad_()]
    assert [result.dtype for result in run(gated_rms_norm, tensors)] == [torch.float16] * 2 + [torch.float32] * 2
    assert_error_is_the_formulas(tensors)


def test_views_equal_contiguous_inputs():
    x, gate, weight_V = build_inputs(4, 6, 8)
    views = [
        x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
        torch.cat([gate, gate], -1)[..., 8:].detach().requires_grad_(),
        torch.stack([weight_V, weight_V], -1)[:, 0].detach().requires_grad_(),
    ]
    results = zip(run(gated_rms_norm, views), run(gated_rms_norm, [x, gate, weight_V]), strict=True)
    assert all(torch.equal(actual, expected) for actual, expected in results)


def test_every_result_is_written(monkeypatch):
    tensors = build_inputs(11, 12)
    expected = run(gated_rms_norm, tensors)
    before = allocate.allocate
    monkeypatch.setattr(allocate, "allocate", lambda *sizes, **how: before(*sizes, **how).fill_(torch.nan))
    assert all(torch.equal(a, b) for a, b in zip(run(gated_rms_norm, tensors), expected, strict=True))


def test_compiled_norm_equals_eager():
    tensors = build_inputs(5, 16)
    compiled = torch.compile(gated_rms_norm, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(run(compiled, tensors), run(gated_rms_norm, tensors), strict=True):
        assert_relative_error_below(1e-6, result=(actual, expected))


def test_checkpointed_norm_equals_eager():
    tensors = build_inputs(5, 16)

    def recompute(*tensors, eps):
        return checkpoint(gated_rms_norm, *tensors, eps=eps, use_reentrant=False)

    results = zip(run(recompute, tensors), run(gated_rms_norm, tensors), strict=True)
    assert all(torch.equal(actual, expected) for actual, expected in results)


def test_operator_registration_passes_torchs_own_check():
    x, gate, weight_V = build_inputs(3, 4)
    torch.library.opcheck(torch.ops.prism.gated_rms_norm.default, (x, gate, weight_V, 1e-6))
    detached = tuple(tensor.detach() for tensor in (x, x, gate, weight_V))
    torch.library.opcheck(torch.ops.prism.gated_rms_norm_backward.default, (*detached, 1e-6))


def test_second_derivative_is_refused():
    tensors = build_inputs(3, 4)
    out = gated_rms_norm(*tensors, eps=1e-6)
    (grad,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="gated_rms_norm_backward"):
        torch.autograd.grad(grad.sum(), tensors[0])


def test_what_the_kernel_cannot_do_is_refused_by_name(monkeypatch):
    x, gate, weight_V = build_inputs(3, 4)
    rule = "dtype=torch.float64 must be one of .*, or call gated_rms_norm_explicit"
    with pytest.raises(ValueError, match=f"x.{rule}"):
        gated_rms_norm(x.double(), gate, weight_V, eps=1e-6)
    with pytest.raises(ValueError, match=f"gate.{rule}"):
        gated_rms_norm(x, gate.double(), weight_V, eps=1e-6)
    with pytest.raises(ValueError, match=r"gate.shape=\(3, 2\) must equal x.shape=\(3, 4\)"):
        gated_rms_norm(x, gate[:, :2], weight_V, eps=1e-6)
    rule = r"weight_V.shape\[0\]=1025 must be from 1 to 1024; change it, or call gated_rms_norm_explicit"
    with pytest.raises(ValueError, match=rule):
        gated_rms_norm(*build_inputs(1, 1025), eps=1e-6)
    monkeypatch.setattr("kernels.checks.is_interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"x.device=cpu must be the CUDA device .*gated_rms_norm_explicit"):
        gated_rms_norm(x.cpu(), gate.cpu(), weight_V.cpu(), eps=1e-6)
