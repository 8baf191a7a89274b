"""The SwiGLU product, the definition: y = SiLU(gate) * up, each step in the input's dtype.

Dims: F inner width; gate and up lie side by side in the last dim of the input.
"""

import torch
import torch.nn.functional as F

from kernels.checks import check_float


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """(..., 2 F) -> (..., F), in the input's dtype. Raises ValueError unless the last dim is even."""
    check_swiglu_input(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def check_swiglu_input(gate_up: torch.Tensor) -> None:
    """Raise ValueError unless the tensor is gate and up side by side."""
    check_float("gate_up", gate_up)
    if gate_up.dim() < 1 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up.shape={tuple(gate_up.shape)} must end in an even width; put up beside gate")
