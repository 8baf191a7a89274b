"""Step sizes and log decays of one token against torch in fp64, in Triton's interpreter or on a GPU."""

import pytest
import torch
from torch.nn import functional

from kernels.prism.token_scalars import gated_log_decay_token, sigmoid_log_decay_token, step_sizes_token

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
# Values about every bend: tiny and large, both signs, softplus' threshold, and beyond the smallest log decay.
LOGITS = [0.0, 1e-7, -1e-4, 0.3, -0.3, 2.0, -2.0, -9.0, 9.0, -15.0, 15.0, 19.9, 20.0, 20.1, -30.0, 60.0, -90.0, -2000.0]
# A logit of 20 is rounded, turned into an exponent by one more product, and back.
BOUND = 100 * torch.finfo(torch.float32).eps


def build(dtype: torch.dtype, rows: int = 3) -> torch.Tensor:
    """Logits (B, 1, 18) amid other columns, as a projection gives them."""
    wide = torch.full((rows, 1, 30), torch.nan)
    wide[:, 0, 6:24] = torch.tensor(LOGITS).expand(rows, -1) * torch.tensor([1.0, 0.9, -1.0])[:rows, None]
    return wide.to(DEVICE, dtype)[..., 6:24]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """A relative bound; results too small for a normal fp32 number may be zero."""
    assert actual.dtype == torch.float32 and actual.shape == expected.shape
    excess = (actual.double() - expected).abs() - BOUND * expected.abs() - torch.finfo(torch.float32).tiny
    assert excess.max() <= 0, (excess.max(), int(excess.argmax()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_step_sizes_are_sigmoids(dtype):
    assert_close(step_sizes_token(build(dtype)), build(dtype).double().sigmoid())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_log_decays_are_bounded_rates_times_softplus(dtype):
    A_log_H = torch.linspace(-1.0, 2.8, 18).to(DEVICE, dtype)
    dt_bias_H = torch.linspace(-6.0, 0.5, 18).to(DEVICE, dtype)
    rate_BTH = functional.softplus(build(dtype).float() + dt_bias_H.float()).double()
    exact_BTH = functional.softplus((build(dtype).float() + dt_bias_H.float()).double())
    expected_BTH = (-A_log_H.double().exp() * exact_BTH).clamp(min=-1000.0)
    assert torch.allclose(rate_BTH, exact_BTH, rtol=1e-6, atol=1e-30)
    assert_close(gated_log_decay_token(build(dtype), A_log_H, dt_bias_H, min_log_decay=-1000.0), expected_BTH)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_log_decays_are_bounded_log_sigmoids(dtype):
    expected_BTH = functional.logsigmoid(build(dtype).double()).clamp(min=-1000.0)
    assert_close(sigmoid_log_decay_token(build(dtype), min_log_decay=-1000.0), expected_BTH)


def test_nan_stays_a_nan_and_infinity_the_smallest_decay():
    logit_BTH = torch.tensor([[[torch.nan, torch.inf, -torch.inf]]], device=DEVICE)
    zero_H = torch.zeros(3, device=DEVICE)
    for decay_BTH, expected in (
        (gated_log_decay_token(logit_BTH, zero_H, zero_H, min_log_decay=-1000.0), [-1000.0, 0.0]),
        (sigmoid_log_decay_token(logit_BTH, min_log_decay=-1000.0), [0.0, -1000.0]),
    ):
        assert decay_BTH[0, 0, 0].isnan() and decay_BTH[0, 0, 1:].tolist() == expected


def test_more_than_a_token_is_refused():
    with pytest.raises(ValueError, match=r"logit_BTC\.shape=\(1, 2, 4\) must be \(B, 1, C\)"):
        step_sizes_token(torch.zeros(1, 2, 4, device=DEVICE))
