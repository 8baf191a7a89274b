"""The PRISM recurrence as a loop over tokens: the definition every other form is measured against.

With k, b the first of the M = max(L, 1) keys and step sizes of a token (arXiv 2602.10796, eq. 14 to 18):

    d_l = act(p_l * r_l),  r_{l+1} = r_l - d_l                          l = 1..L  (L = 0: d_1 = r_1)
    S_t = alpha_t S_{t-1} (I - b k k^T) + sum_l b_l d_l k_l^T           V x K
    o_t = S_t q_t K^(-1/2)

Dims: B batch, T tokens, H heads, K key width, V value width, L solver steps, M written pairs = max(L, 1).
"""

import torch
import torch.nn.functional as F

from kernels.checks import (
    check_at_least,
    check_dtype,
    check_float,
    check_num_dims,
    check_one_of,
    check_shape,
    compute_dtype_of,
)
from kernels.prism.activation import ACTIVATIONS, Activation


def prism_scan_reference(
    query_BTHK: torch.Tensor,
    key_BTMHK: torch.Tensor,
    residual_BTHV: torch.Tensor,
    gain_BTLHV: torch.Tensor | None,
    step_size_BTMH: torch.Tensor,
    log_decay_BTH: torch.Tensor,
    *,
    activation: Activation = "gelu",
    entry_state_BHVK: torch.Tensor | None = None,
    document_start_BT: torch.Tensor | None = None,
    chunk_tokens: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over T tokens, one at a time.

    query_BTHK: scaled by K^(-1/2) inside. key_BTMHK: L2-normalised by the caller. residual_BTHV: the first residual
    v - u (v itself for L = 0). gain_BTLHV: p_l, or None for L = 0. step_size_BTMH: in [0, 1]. log_decay_BTH: natural
    logarithm of alpha, <= 0 and finite: an alpha of 0 is any finite value below -1000, never -inf, of which the chunk
    form takes differences (not checked, as reading a value would stall a GPU). entry_state_BHVK: state before the
    first token, zero if None. document_start_BT: bool, True where a token begins a document; the state before such a
    token is zero. chunk_tokens changes nothing here.

    Returns the output in query's dtype and the state after the last token, both computed in fp32 (fp64 for fp64
    inputs); the state stays in that dtype. Raises ValueError on shapes and dtypes that do not fit.
    """
    check_scan_inputs(query_BTHK, key_BTMHK, residual_BTHV, gain_BTLHV, step_size_BTMH, log_decay_BTH, activation)
    check_scan_state(query_BTHK, residual_BTHV, entry_state_BHVK, document_start_BT, chunk_tokens)
    dtype = compute_dtype_of(query_BTHK)
    query, key, step_size = query_BTHK.to(dtype), key_BTMHK.to(dtype), step_size_BTMH.to(dtype)
    write = compute_writes(residual_BTHV, gain_BTLHV, step_size_BTMH, activation)
    alpha = log_decay_BTH.to(dtype).exp()
    B, T, H, K = query.shape
    state = query.new_zeros(B, H, residual_BTHV.shape[-1], K) if entry_state_BHVK is None else entry_state_BHVK
    state, outputs = state.to(dtype), []
    for t in range(T):
        if document_start_BT is not None:
            state = torch.where(document_start_BT[:, t, None, None, None], torch.zeros_like(state), state)
        state = advance_state(state, key[:, t], write[:, t], step_size[:, t], alpha[:, t])
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, query[:, t]) * K**-0.5)
    return torch.stack(outputs, dim=1).to(query_BTHK.dtype), state


def advance_state(
    state_BHVK: torch.Tensor,
    key_BMHK: torch.Tensor,
    write_BMHV: torch.Tensor,
    step_size_BMH: torch.Tensor,
    alpha_BH: torch.Tensor,
) -> torch.Tensor:
    """One token's update of the state: decay, forget along the first key, write all M pairs."""
    forget_key_BHK = key_BMHK[:, 0]
    read_BHV = torch.einsum("bhvk,bhk->bhv", state_BHVK, forget_key_BHK) * step_size_BMH[:, 0, :, None]
    kept_BHVK = state_BHVK - read_BHV[..., None] * forget_key_BHK[..., None, :]
    return alpha_BH[..., None, None] * kept_BHVK + torch.einsum("bmhv,bmhk->bhvk", write_BMHV, key_BMHK)


def compute_writes(
    residual: torch.Tensor, gain: torch.Tensor | None, step_size: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """The written values b_l d_l [..., M, H, V] of residual [..., H, V], gain [..., L, H, V], step_size [..., M, H].

    Computed and returned in fp32 (fp64 for fp64 inputs). GELU is the exact one (erf).
    """
    dtype = compute_dtype_of(residual)
    residual, step_size = residual.to(dtype), step_size.to(dtype)
    if gain is None:
        return residual.unsqueeze(-3) * step_size[..., None]
    writes = []
    for gain_HV in gain.to(dtype).unbind(-3):
        step = gain_HV * residual
        step = F.gelu(step) if activation == "gelu" else step
        residual = residual - step
        writes.append(step)
    return torch.stack(writes, dim=-3) * step_size[..., None]


def check_scan_inputs(
    query_BTHK: torch.Tensor,
    key_BTMHK: torch.Tensor,
    residual_BTHV: torch.Tensor,
    gain_BTLHV: torch.Tensor | None,
    step_size_BTMH: torch.Tensor,
    log_decay_BTH: torch.Tensor,
    activation: Activation,
) -> None:
    """Raise ValueError unless the scan's tensors fit together."""
    check_num_dims("query_BTHK", query_BTHK, "BTHK")
    check_num_dims("key_BTMHK", key_BTMHK, "BTMHK")
    check_num_dims("residual_BTHV", residual_BTHV, "BTHV")
    check_float("query_BTHK", query_BTHK)
    check_one_of("activation", activation, ACTIVATIONS)
    B, T, H, K = query_BTHK.shape
    M, V = key_BTMHK.shape[2], residual_BTHV.shape[-1]
    check_at_least("query_BTHK.shape[1]", T, 1)
    check_shape("key_BTMHK", key_BTMHK, "(B, T, M, H, K)", (B, T, M, H, K))
    check_shape("residual_BTHV", residual_BTHV, "(B, T, H, V)", (B, T, H, V))
    check_shape("step_size_BTMH", step_size_BTMH, "(B, T, M, H)", (B, T, M, H))
    check_shape("log_decay_BTH", log_decay_BTH, "(B, T, H)", (B, T, H))
    if gain_BTLHV is None:
        check_shape("key_BTMHK", key_BTMHK, "(B, T, 1, H, K) without gains", (B, T, 1, H, K))
    else:
        check_shape("gain_BTLHV", gain_BTLHV, "(B, T, L=M, H, V)", (B, T, M, H, V))


def check_scan_state(
    query_BTHK: torch.Tensor,
    residual_BTHV: torch.Tensor,
    entry_state_BHVK: torch.Tensor | None,
    document_start_BT: torch.Tensor | None,
    chunk_tokens: int,
) -> None:
    """Raise ValueError unless the optional arguments of a scan fit its tensors."""
    B, T, H, K = query_BTHK.shape
    check_at_least("chunk_tokens", chunk_tokens, 1)
    if entry_state_BHVK is not None:
        sizes = (B, H, residual_BTHV.shape[-1], K)
        check_shape("entry_state_BHVK", entry_state_BHVK, "(B, H, V, K)", sizes)
    if document_start_BT is not None:
        check_shape("document_start_BT", document_start_BT, "(B, T)", (B, T))
        check_dtype("document_start_BT", document_start_BT, torch.bool)
