"""One token of the PRISM recurrence in plain torch: the definition of a decode step, O(H K V) work.

The equation and the dim letters are those of reference.py.
"""

import torch

from kernels.checks import compute_dtype_of
from kernels.prism.activation import Activation
from kernels.prism.reference import advance_state, check_scan_inputs, check_scan_state, compute_writes


def prism_step_reference(
    query_BHK: torch.Tensor,
    key_BMHK: torch.Tensor,
    residual_BHV: torch.Tensor,
    gain_BLHV: torch.Tensor | None,
    step_size_BMH: torch.Tensor,
    log_decay_BH: torch.Tensor,
    *,
    activation: Activation = "gelu",
    state_BHVK: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance the state by one token and read it.

    Arguments are one token of `prism_scan_reference`'s, with the same units and ranges; a token that begins a document
    is given a zero state by the caller. Returns the output (B, H, V) in query's dtype and the new state in fp32 (fp64
    for fp64 inputs). Raises ValueError on shapes and dtypes that do not fit.
    """
    row = [tensor.unsqueeze(1) for tensor in (query_BHK, key_BMHK, residual_BHV, step_size_BMH, log_decay_BH)]
    gain_row = None if gain_BLHV is None else gain_BLHV.unsqueeze(1)
    check_scan_inputs(row[0], row[1], row[2], gain_row, row[3], row[4], activation)
    check_scan_state(row[0], row[2], state_BHVK, None, 1)
    dtype = compute_dtype_of(query_BHK)
    write_BMHV = compute_writes(residual_BHV, gain_BLHV, step_size_BMH, activation)
    alpha_BH = log_decay_BH.to(dtype).exp()
    state_BHVK = advance_state(state_BHVK.to(dtype), key_BMHK.to(dtype), write_BMHV, step_size_BMH.to(dtype), alpha_BH)
    out_BHV = torch.einsum("bhvk,bhk->bhv", state_BHVK, query_BHK.to(dtype)) * query_BHK.shape[-1] ** -0.5
    return out_BHV.to(query_BHK.dtype), state_BHVK
