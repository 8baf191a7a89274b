"""The Triton form against the formula: output and both gradients, slices of wider projections, uninitialised memory."""

import pytest
import torch

from kernels import allocate
from kernels.checks import is_interpreted
from kernels.unit_keys.fused import unit_keys
from kernels.unit_keys.reference import unit_keys_reference
from tests.kernels.compare import assert_error_at_most_twice, assert_relative_error_below

DEVICE = "cpu" if is_interpreted() else "cuda"
SHAPES = [(1, 1, 1, 16, 0), (2, 37, 3, 64, 1), (1, 5, 2, 80, 3), (2, 64, 2, 128, 1)]


def build_keys(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    B, T, H, K, X = shape
    generator = torch.Generator().manual_seed(sum(shape))
    keys = [torch.randn(B, T, H, K, generator=generator, dtype=torch.float64)]
    keys += [torch.randn(B, T, X, H, K, generator=generator, dtype=torch.float64)] if X else []
    keys[0][0, 0] = 0
    return [key.to(DEVICE, dtype).requires_grad_() for key in keys]


def run(operator, keys: list[torch.Tensor]) -> list[torch.Tensor]:
    out = operator(*keys)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
    return [out, *torch.autograd.grad(out, keys, weights)]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate_nan(*sizes, like, dtype=None):
        return torch.full(sizes, torch.nan, device=like.device, dtype=dtype or like.dtype)

    monkeypatch.setattr(allocate, "allocate", allocate_nan)


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_equals_the_formula_in_output_and_gradients(shape, poison):
    """The gradient subtracts what lies along the key, so some roundings of 2^-24 are magnified a few times."""
    actual, expected = (
        run(operator, build_keys(shape, torch.float32)) for operator in (unit_keys, unit_keys_reference)
    )
    assert_relative_error_below(2**-19, **{str(i): pair for i, pair in enumerate(zip(actual, expected, strict=True))})


def test_fp16_errs_no_more_than_the_formula_does():
    shape = SHAPES[1]
    triples = zip(
        run(unit_keys, build_keys(shape, torch.float16)),
        run(unit_keys_reference, build_keys(shape, torch.float16)),
        run(unit_keys_reference, [key.detach().double().requires_grad_() for key in build_keys(shape, torch.float16)]),
        strict=True,
    )
    assert_error_at_most_twice(2**-11, **{str(i): triple for i, triple in enumerate(triples)})


def test_slice_of_a_projection_is_read_where_it_lies():
    wide = torch.randn(2, 7, 3 * 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    part = wide[..., 32:64].unflatten(-1, (2, 16))
    assert torch.equal(unit_keys(part), unit_keys(part.contiguous()))


def test_operator_passes_torchs_own_checks_of_custom_operators():
    torch.library.opcheck(torch.ops.prism.unit_keys.default, tuple(build_keys((1, 5, 2, 16, 1), torch.float32)))


def test_fp64_is_refused_and_the_plain_form_named():
    with pytest.raises(ValueError, match="unit_keys_reference"):
        unit_keys(torch.ones(1, 1, 1, 16, dtype=torch.float64, device=DEVICE))
