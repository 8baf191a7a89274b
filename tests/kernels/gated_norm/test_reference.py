"""The formula's properties."""

import pytest
import torch

from kernels.gated_norm.reference import gated_rms_norm_reference
from tests.kernels.compare import assert_relative_error_below


def test_open_gate_and_unit_weight_leave_root_mean_square_one():
    x = torch.randn(3, 4, 64, dtype=torch.float64) * 7
    gate = torch.full_like(x, 50.0)  # SiLU(50) = 50 to fp64
    out = gated_rms_norm_reference(x, gate, torch.ones(64, dtype=torch.float64), eps=0.0) / 50
    assert_relative_error_below(1e-14, rms=(out.square().mean(-1).sqrt(), torch.ones(3, 4)))


def test_gate_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"gate.shape=\(2, 1\) must equal x.shape=\(2, 8\)"):
        gated_rms_norm_reference(torch.ones(2, 8), torch.ones(2, 1), torch.ones(8), eps=1e-6)
