"""The convolution of one token against the loop, in Triton's interpreter or on a GPU."""

import pytest
import torch

from kernels.short_conv.fused import short_conv
from kernels.short_conv.reference import short_conv_reference
from kernels.short_conv.token import short_conv_token

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(B: int, W: int, D: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(B + W + D)
    shapes = ((B, 1, D), (D, W), (B, W - 1, D))
    x_BTD, weight_DW, window_BWD = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    return x_BTD, weight_DW, window_BWD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("B", "W", "D"), [(1, 4, 5), (3, 4, 300), (2, 2, 64), (2, 3, 17), (1, 8, 256)])
def test_output_and_window_are_the_fused_kernels(B, W, D, dtype):
    """Equal bit by bit: the same products, added in the same order."""
    x_BTD, weight_DW, window_BWD = build(B, W, D, dtype)
    expected_BTD, expected_BWD = short_conv(x_BTD, weight_DW, entry_BWD=window_BWD)
    out_BTD = short_conv_token(x_BTD, weight_DW, window_BWD=window_BWD)
    assert torch.equal(out_BTD, expected_BTD) and torch.equal(window_BWD, expected_BWD)


def test_tokens_one_by_one_are_the_loop():
    x_BTD, weight_DW, window_BWD = (
        tensor[:1] if tensor.dim() == 3 else tensor for tensor in build(6, 4, 40, torch.float32)
    )
    x_BTD = build(6, 4, 40, torch.float32)[0].transpose(0, 1)
    expected_BTD, expected_BWD = short_conv_reference(x_BTD.double(), weight_DW.double(), entry_BWD=window_BWD.double())
    window_BWD = window_BWD.clone()
    outputs = [short_conv_token(x_BTD[:, t, None], weight_DW, window_BWD=window_BWD) for t in range(6)]
    # Four products and a SiLU.
    assert (torch.cat(outputs, dim=1) - expected_BTD).abs().max() <= 10 * torch.finfo(torch.float32).eps * 4
    assert torch.equal(window_BWD.double(), expected_BWD)


def test_inputs_that_do_not_fit_are_refused():
    x_BTD, weight_DW, window_BWD = build(2, 4, 16, torch.float32)
    with pytest.raises(ValueError, match=r"x_BTD.*\(B, 1, D\)"):
        short_conv_token(x_BTD.repeat(1, 2, 1), weight_DW, window_BWD=window_BWD)
    with pytest.raises(ValueError, match=r"window_BWD\.stride\(\)=.* must be contiguous"):
        short_conv_token(x_BTD, weight_DW, window_BWD=window_BWD.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match=r"weight_DW\.requires_grad=True must be False"):
        short_conv_token(x_BTD, weight_DW.requires_grad_(), window_BWD=window_BWD)
