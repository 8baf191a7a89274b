"""The loop against torch's convolution."""

import pytest
import torch
import torch.nn.functional as F

from kernels.short_conv.reference import short_conv_reference
from tests.kernels.compare import assert_relative_error_below


@pytest.mark.parametrize("W", [1, 2, 4])
def test_unpacked_row_equals_torch_conv1d(W):
    generator = torch.Generator().manual_seed(0)
    x_BTD = torch.randn(2, 9, 5, generator=generator, dtype=torch.float64)
    weight_DW = torch.randn(5, W, generator=generator, dtype=torch.float64)
    out, window = short_conv_reference(x_BTD, weight_DW)
    padded_BDT = F.pad(x_BTD.mT, (W - 1, 0))
    expected = F.silu(F.conv1d(padded_BDT, weight_DW[:, None], groups=5)).mT
    assert_relative_error_below(1e-14, out=(out, expected), window=(window, x_BTD[:, 10 - W :]))


@pytest.mark.parametrize(
    ("entry", "start", "message"),
    [
        (torch.zeros(2, 4, 5), None, r"entry_BWD.shape=\(2, 4, 5\) must equal \(B, W-1, D\)=\(2, 3, 5\)"),
        (None, torch.zeros(2, 8, dtype=torch.bool), r"document_start_BT.shape=\(2, 8\) must equal \(B, T\)=\(2, 9\)"),
    ],
)
def test_ill_fitting_argument_is_refused_by_name(entry, start, message):
    with pytest.raises(ValueError, match=message):
        short_conv_reference(torch.zeros(2, 9, 5), torch.zeros(5, 4), entry_BWD=entry, document_start_BT=start)
