"""The exact chunk form of the PRISM recurrence in plain torch: batched over rows, heads and chunks.

Per head and chunk, S (K x V) the state at its start, G the inclusive cumulative log decay, gamma = e^G,
Gam_ij = e^(G_i - G_j) for i >= j of one document, else 0, Gs its strict part; k, b the first key and step size,
K_l the write keys, E_l = b_l d_l the written values:

    T = (I + b Gs.(k k^T))^-1
    V' = T [E_1 - sum_{l>=2} b Gs.(k K_l^T) E_l - b gamma k S] = u - w S
    O = gamma q S + Gam.(q k^T) V' + sum_{l>=2} Gam.(q K_l^T) E_l
    S_next = gamma_C S + k^T (e V') + sum_{l>=2} K_l^T (e E_l) = M S + N         e_j = Gam_Cj

so the only serial work is S_next = M S + N, one K x K by K x V product a chunk. The backward is the adjoint of these
lines: no gradient passes through the triangular inverse, and its serial work is one transposed product a chunk.

Dims: B batch, T tokens, H heads, K key width, V value width, L solver steps, M written pairs, C tokens in a chunk,
N chunks; P = B H N chunks of all rows and heads, G = B H, J = M C written pairs of a chunk (pair-major),
U = 2 C reads of a chunk: its queries, then its first keys.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels.checks import compute_dtype_of
from kernels.prism.activation import Activation
from kernels.prism.reference import check_scan_inputs, check_scan_state, compute_writes

MIN_CHUNK_TOKENS = 16
# Smaller factors are set to zero in fp32: they cannot change a sum, and subnormals slow a CPU's products a hundredfold.
MIN_FP32_EXPONENT = -60.0


def prism_scan_chunked(
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
    """Run the recurrence over T tokens in chunks of `chunk_tokens`; the arguments of `prism_scan_reference`.

    Any T and any chunk_tokens >= 1 are exact: the result depends on neither, beyond rounding. Computed in fp32 (fp64
    for fp64 inputs) whatever the inputs' dtype. Differentiable once, in every tensor argument but document_start_BT.
    log_decay_BTH must be finite: -inf would give NaN.

    Returns the output in query's dtype and the state after the last token in the dtype of computation. Raises
    ValueError on shapes and dtypes that do not fit.
    """
    check_scan_inputs(query_BTHK, key_BTMHK, residual_BTHV, gain_BTLHV, step_size_BTMH, log_decay_BTH, activation)
    check_scan_state(query_BTHK, residual_BTHV, entry_state_BHVK, document_start_BT, chunk_tokens)
    cut = cut_scan(
        query_BTHK, key_BTMHK, residual_BTHV, gain_BTLHV, step_size_BTMH, log_decay_BTH,
        activation, document_start_BT, chunk_tokens,
    )  # fmt: skip
    (B, _, H, K), V, dtype = query_BTHK.shape, residual_BTHV.shape[-1], cut.query_PCK.dtype
    if entry_state_BHVK is None:
        entry_GKV = query_BTHK.new_zeros(B * H, K, V, dtype=dtype)
    else:
        entry_GKV = entry_state_BHVK.to(dtype).mT.reshape(B * H, K, V)
    out_PCV, final_GKV = _ChunkScan.apply(entry_GKV, *cut)
    return join_chunks(out_PCV, query_BTHK), final_GKV.view(B, H, K, V).mT


class Cut(NamedTuple):
    """Tensors of a scan cut in chunks, in the dtype of computation; queries are scaled."""

    query_PCK: torch.Tensor
    key_PJK: torch.Tensor
    write_PJV: torch.Tensor
    erase_PC: torch.Tensor  # the first pair's step sizes
    log_decay_PC: torch.Tensor
    segment_PC: torch.Tensor | None  # how many documents began in the chunk, up to and with each token


def cut_scan(
    query_BTHK: torch.Tensor,
    key_BTMHK: torch.Tensor,
    residual_BTHV: torch.Tensor,
    gain_BTLHV: torch.Tensor | None,
    step_size_BTMH: torch.Tensor,
    log_decay_BTH: torch.Tensor,
    activation: Activation,
    document_start_BT: torch.Tensor | None,
    chunk_tokens: int,
) -> Cut:
    """A scan's arguments in chunks of at most chunk_tokens; a short row gets shorter ones."""
    dtype, (_, T, H, K) = compute_dtype_of(query_BTHK), query_BTHK.shape
    C = min(chunk_tokens, max(MIN_CHUNK_TOKENS, 1 << (T - 1).bit_length()))
    write_BTMHV = compute_writes(residual_BTHV, gain_BTLHV, step_size_BTMH, activation)
    return Cut(
        _cut_tokens(query_BTHK.to(dtype) * K**-0.5, C),
        _cut_pairs(key_BTMHK.to(dtype), C),
        _cut_pairs(write_BTMHV, C),
        _cut_tokens(step_size_BTMH[:, :, 0, :, None].to(dtype), C).squeeze(-1),
        _cut_tokens(log_decay_BTH[..., None].to(dtype), C).squeeze(-1),
        None if document_start_BT is None else _compute_segments(document_start_BT, H, C),
    )


def join_chunks(out_PCV: torch.Tensor, query_BTHK: torch.Tensor) -> torch.Tensor:
    """The output (B, T, H, V) in query's dtype."""
    B, T, H, _ = query_BTHK.shape
    out_BTHV = out_PCV.view(B, H, -1, out_PCV.shape[-1])[:, :, :T].transpose(1, 2)
    return out_BTHV.to(query_BTHK.dtype)


def _cut_tokens(tensor_BTHX: torch.Tensor, C: int) -> torch.Tensor:
    """(B, T, H, X) to (P, C, X), the last chunk padded with zeros: a padded token changes no state."""
    return _cut_pairs(tensor_BTHX.unsqueeze(2), C)


def _cut_pairs(tensor_BTMHX: torch.Tensor, C: int) -> torch.Tensor:
    """(B, T, M, H, X) to (P, J, X), pair-major inside a chunk, the last chunk padded with zeros."""
    _, T, M, _, X = tensor_BTMHX.shape
    if T % C:
        tensor_BTMHX = F.pad(tensor_BTMHX, (0, 0, 0, 0, 0, 0, 0, -T % C))
    cut_BHNMCX = tensor_BTMHX.unflatten(1, (-1, C)).permute(0, 4, 1, 3, 2, 5)
    return cut_BHNMCX.reshape(-1, M * C, X)


def _compute_segments(document_start_BT: torch.Tensor, H: int, C: int) -> torch.Tensor:
    """(P, C) int32: how many documents began in the chunk up to and with each token."""
    start_BTH1 = document_start_BT[:, :, None, None].expand(-1, -1, H, 1).to(torch.int32)
    return _cut_tokens(start_BTH1, C).squeeze(-1).cumsum(-1, dtype=torch.int32)


class _Decays(NamedTuple):
    """Decay factors of every chunk, in the dtype of computation; zero where a document start lies between."""

    between_PCC: torch.Tensor  # from after token j to token i >= j
    strict_PCC: torch.Tensor  # the same for i > j
    entry_PC: torch.Tensor  # from the chunk's start to token i
    exit_PC: torch.Tensor  # from after token j to the chunk's end
    carry_P: torch.Tensor  # over the whole chunk


def _compute_decays(log_decay_PC: torch.Tensor, segment_PC: torch.Tensor | None) -> _Decays:
    # Differences of long sums cancel: after strong decays fp32 would lose the weak ones that follow.
    total_PC = log_decay_PC.double().cumsum(-1)
    C, dtype = log_decay_PC.shape[-1], log_decay_PC.dtype
    visible = torch.ones(C, C, dtype=torch.bool, device=log_decay_PC.device).tril()
    if segment_PC is not None:
        visible = visible & (segment_PC[:, :, None] == segment_PC[:, None, :])
    between_PCC = (total_PC[:, :, None] - total_PC[:, None, :]).masked_fill_(~visible, -torch.inf)
    entry_PC = total_PC if segment_PC is None else total_PC.masked_fill(segment_PC > 0, -torch.inf)
    between_PCC, entry_PC = _exp(between_PCC.to(dtype)), _exp(entry_PC.to(dtype))
    return _Decays(between_PCC, between_PCC.tril(-1), entry_PC, between_PCC[:, -1].contiguous(), entry_PC[:, -1])


def _exp(exponent: torch.Tensor) -> torch.Tensor:
    if exponent.dtype == torch.float32:
        exponent = F.threshold(exponent, MIN_FP32_EXPONENT, -torch.inf)
    return exponent.exp()


def _invert_unit_lower(strict_PCC: torch.Tensor) -> torch.Tensor:
    """(I + strict)^-1 by forward substitution."""
    eye = torch.eye(strict_PCC.shape[-1], dtype=strict_PCC.dtype, device=strict_PCC.device)
    return torch.linalg.solve_triangular(strict_PCC, eye.expand_as(strict_PCC), upper=False, unitriangular=True)


def _pair_view(tensor_PUJ: torch.Tensor) -> torch.Tensor:
    """(P, U, J) as (P, 2, C, M, C)."""
    P, U, J = tensor_PUJ.shape
    return tensor_PUJ.view(P, 2, U // 2, 2 * J // U, U // 2)


def _both_decays(decays: _Decays) -> torch.Tensor:
    return torch.stack([decays.between_PCC, decays.strict_PCC], dim=1).unsqueeze(3)


def run_states(step_GNKK: torch.Tensor, source_GNKV: torch.Tensor, entry_GKV: torch.Tensor) -> list[torch.Tensor]:
    """The N + 1 states of S_{n+1} = step_n S_n + source_n."""
    states = [entry_GKV]
    for step_GKK, source_GKV in zip(step_GNKK.unbind(1), source_GNKV.unbind(1), strict=True):
        states.append(torch.baddbmm(source_GKV, step_GKK, states[-1]))
    return states


def _scale_pairs(tensor_PJX: torch.Tensor, scale_PC: torch.Tensor) -> torch.Tensor:
    """Scale token c of every pair's rows by scale[:, c]."""
    P, J, X = tensor_PJX.shape
    return (tensor_PJX.view(P, -1, scale_PC.shape[1], X) * scale_PC[:, None, :, None]).view(P, J, X)


def _sum_pairs(tensor_PJ: torch.Tensor, C: int) -> torch.Tensor:
    return tensor_PJ.unflatten(1, (-1, C)).sum(1)


def _compute_step(carry_P: torch.Tensor, exit_key_PCK: torch.Tensor, w_PCK: torch.Tensor) -> torch.Tensor:
    """The matrix M (P, K, K) that takes a chunk's entry state to its share of the exit state."""
    step_PKK = torch.bmm(exit_key_PCK.mT, w_PCK).neg_()
    step_PKK.diagonal(dim1=1, dim2=2).add_(carry_P[:, None])
    return step_PKK


class Prepared(NamedTuple):
    """What no state enters, of every chunk."""

    read_PUK: torch.Tensor  # queries, then b k
    key_PJK: torch.Tensor
    erase_PC: torch.Tensor
    value_PJV: torch.Tensor  # u, then E_l for l >= 2
    inverse_PCC: torch.Tensor
    scores_PUJ: torch.Tensor  # rows of queries Gam.(q K_l^T) over rows of first keys b Gs.(k K_l^T)
    w_PCK: torch.Tensor
    decays: _Decays
    step_PKK: torch.Tensor  # M
    source_PKV: torch.Tensor  # N


class Saved(NamedTuple):
    """What the forward keeps for the backward."""

    read_PUK: torch.Tensor
    key_PJK: torch.Tensor
    erase_PC: torch.Tensor
    value_PJV: torch.Tensor  # V', then E_l for l >= 2
    inverse_PCC: torch.Tensor
    scores_PUJ: torch.Tensor
    w_PCK: torch.Tensor
    state_PKV: torch.Tensor  # at each chunk's start
    decays: _Decays

    def flatten(self) -> tuple[torch.Tensor, ...]:
        """Tensors alone, for `save_for_backward`."""
        return (*self[:-1], *self.decays)

    @classmethod
    def from_flat(cls, tensors: tuple[torch.Tensor, ...]) -> "Saved":
        """What `flatten` returned."""
        last = len(cls._fields) - 1
        return cls(*tensors[:last], _Decays(*tensors[last:]))


class _ChunkScan(torch.autograd.Function):
    """The chunk form on an entry state (G, K, V) and what `Cut` holds: output (P, C, V) and final state (G, K, V)."""

    @staticmethod
    def forward(ctx, entry_GKV, *cut):
        G = entry_GKV.shape[0]
        chunks = prepare_chunks(Cut(*cut))
        states = run_states(chunks.step_PKK.unflatten(0, (G, -1)), chunks.source_PKV.unflatten(0, (G, -1)), entry_GKV)
        out_PCV, saved = read_out(chunks, torch.stack(states[:-1], dim=1).flatten(0, 1))
        ctx.save_for_backward(*saved.flatten())
        return out_PCV, states[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out_PCV, grad_final_GKV):
        saved = Saved.from_flat(ctx.saved_tensors)  # read once: activation checkpointing allows no second reading
        back_GNKK, source_GNKV = prepare_state_grads(saved, grad_out_PCV, grad_final_GKV.shape[0])
        grads = run_states(back_GNKK, source_GNKV, grad_final_GKV)
        grad_next_PKV = torch.stack(grads[-2::-1], dim=1).flatten(0, 1)
        return grads[-1], *compute_cut_grads(saved, grad_out_PCV, grad_next_PKV), None


def prepare_chunks(cut: Cut) -> Prepared:
    """The forward up to the states of `run_states`."""
    C, key_PJK = cut.query_PCK.shape[1], cut.key_PJK
    decays = _compute_decays(cut.log_decay_PC, cut.segment_PC)
    read_PUK = torch.cat([cut.query_PCK, cut.erase_PC[:, :, None] * key_PJK[:, :C]], dim=1)
    scores_PUJ = torch.bmm(read_PUK, key_PJK.mT)
    _pair_view(scores_PUJ).mul_(_both_decays(decays))
    inverse_PCC = _invert_unit_lower(scores_PUJ[:, C:, :C])
    value_PJV = _solve_values(inverse_PCC, scores_PUJ[:, C:, C:], cut.write_PJV)
    w_PCK = torch.bmm(inverse_PCC, decays.entry_PC[:, :, None] * read_PUK[:, C:])
    exit_key_PJK = _scale_pairs(key_PJK, decays.exit_PC)
    step_PKK = _compute_step(decays.carry_P, exit_key_PJK[:, :C], w_PCK)
    source_PKV = torch.bmm(exit_key_PJK.mT, value_PJV)
    kept = (read_PUK, key_PJK, cut.erase_PC, value_PJV, inverse_PCC, scores_PUJ, w_PCK, decays)
    return Prepared(*kept, step_PKK, source_PKV)


def read_out(chunks: Prepared, state_PKV: torch.Tensor) -> tuple[torch.Tensor, Saved]:
    """The output (P, C, V) from the states at the chunks' starts. Turns the chunks' u into V' in place."""
    C = chunks.erase_PC.shape[1]
    chunks.value_PJV[:, :C].baddbmm_(chunks.w_PCK, state_PKV, alpha=-1)
    out_PCV = torch.bmm(chunks.scores_PUJ[:, :C], chunks.value_PJV)
    out_PCV = torch.baddbmm(out_PCV, chunks.decays.entry_PC[:, :, None] * chunks.read_PUK[:, :C], state_PKV)
    return out_PCV, Saved(*chunks[:7], state_PKV, chunks.decays)


def compute_cut_grads(
    saved: Saved, grad_out_PCV: torch.Tensor, grad_next_PKV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the floats of `Cut`, from those of the output and of the state after each chunk."""
    grad_write_PJV = _compute_write_grads(saved, grad_out_PCV, grad_next_PKV)
    C = grad_out_PCV.shape[1]
    back_PUV = torch.cat([grad_out_PCV, -grad_write_PJV[:, :C]], dim=1)
    link_PUJ = torch.bmm(back_PUV, saved.value_PJV.mT)
    pair_PC = _sum_pair_grads(link_PUJ * saved.scores_PUJ)
    _pair_view(link_PUJ).mul_(_both_decays(saved.decays))
    grad_query_PCK, grad_read_PCK, through_PC = _compute_read_grads(saved, back_PUV, link_PUJ)
    grad_key_PJK, exit_PC = _compute_key_grads(saved, link_PUJ, grad_next_PKV)
    grad_key_PJK[:, :C].addcmul_(saved.erase_PC[:, :, None], grad_read_PCK)
    grad_erase_PC = (saved.key_PJK[:, :C] * grad_read_PCK).sum(-1)
    carry_P = saved.decays.carry_P * (saved.state_PKV * grad_next_PKV).sum((1, 2))
    grad_log_decay_PC = _sum_decay_grads(pair_PC + through_PC, exit_PC, carry_P)
    return grad_query_PCK, grad_key_PJK, grad_write_PJV, grad_erase_PC, grad_log_decay_PC


def _solve_values(inverse_PCC: torch.Tensor, forget_PCJ: torch.Tensor, write_PJV: torch.Tensor) -> torch.Tensor:
    """(P, J, V): u, the first writes as the chunk's own forgetting leaves them, then the other writes unchanged."""
    first_PCV, rest_PJV = write_PJV.split([inverse_PCC.shape[1], forget_PCJ.shape[2]], dim=1)
    if forget_PCJ.shape[2]:
        first_PCV = torch.baddbmm(first_PCV, forget_PCJ, rest_PJV, alpha=-1)
    return torch.cat([torch.bmm(inverse_PCC, first_PCV), rest_PJV], dim=1)


def prepare_state_grads(saved: Saved, grad_out_PCV: torch.Tensor, G: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps (G, N, K, K) and sources (G, N, K, V), last chunk first, with which `run_states` runs the gradient of the
    state after the last chunk back to that of the entry state."""
    C, decays = grad_out_PCV.shape[1], saved.decays
    step_PKK = _compute_step(decays.carry_P, decays.exit_PC[:, :, None] * saved.key_PJK[:, :C], saved.w_PCK)
    entry_query_PCK = decays.entry_PC[:, :, None] * saved.read_PUK[:, :C]
    reach_PCK = torch.baddbmm(entry_query_PCK, saved.scores_PUJ[:, :C, :C], saved.w_PCK, alpha=-1)
    source_GNKV = torch.bmm(reach_PCK.mT, grad_out_PCV).unflatten(0, (G, -1))
    return step_PKK.mT.unflatten(0, (G, -1)).flip(1), source_GNKV.flip(1)


def _compute_write_grads(saved: Saved, grad_out_PCV: torch.Tensor, grad_next_PKV: torch.Tensor) -> torch.Tensor:
    """(P, J, V): lambda for the first writes, then dE_l."""
    C = grad_out_PCV.shape[1]
    attend_PCJ, forget_PCJ = saved.scores_PUJ.split(C, dim=1)
    exit_key_PJK = _scale_pairs(saved.key_PJK, saved.decays.exit_PC)
    grad_PJV = torch.bmm(attend_PCJ.mT, grad_out_PCV).baddbmm_(exit_key_PJK, grad_next_PKV)
    first_PCV = torch.bmm(saved.inverse_PCC.mT, grad_PJV[:, :C])
    grad_PJV[:, :C] = first_PCV
    if grad_PJV.shape[1] > C:
        grad_PJV[:, C:].baddbmm_(forget_PCJ[:, :, C:].mT, first_PCV, alpha=-1)
    return grad_PJV


def _compute_read_grads(
    saved: Saved, back_PUV: torch.Tensor, link_PUJ: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the queries and of (b k) as reads, and what reaches log decay through the entry state (P, C)."""
    C = saved.erase_PC.shape[1]
    entry_PUK = _scale_pairs(torch.bmm(back_PUV, saved.state_PKV.mT), saved.decays.entry_PC)
    through_PC = _sum_pairs((saved.read_PUK * entry_PUK).sum(-1), C)
    grad_query_PCK, grad_read_PCK = torch.baddbmm(entry_PUK, link_PUJ, saved.key_PJK).split(C, dim=1)
    return grad_query_PCK, grad_read_PCK, through_PC


def _compute_key_grads(
    saved: Saved, link_PUJ: torch.Tensor, grad_next_PKV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of all keys as written (P, J, K), and what reaches log decay through the exit state (P, C)."""
    C = saved.erase_PC.shape[1]
    exit_PJK = _scale_pairs(torch.bmm(saved.value_PJV, grad_next_PKV.mT), saved.decays.exit_PC)
    through_PC = _sum_pairs((saved.key_PJK * exit_PJK).sum(-1), C)
    return torch.baddbmm(exit_PJK, link_PUJ.mT, saved.read_PUK), through_PC


def _sum_pair_grads(grad_PUJ: torch.Tensor) -> torch.Tensor:
    """(P, C): of the pairs (i, j < i), the sum over j of row t less the sum over i of column t. Changes its argument.

    The diagonal (i = j) is dropped first: no decay touches it, and its rounding would drown strongly decayed pairs.
    """
    C = grad_PUJ.shape[1] // 2
    _pair_view(grad_PUJ)[:, 0].diagonal(dim1=1, dim2=3).zero_()
    return _sum_pairs(grad_PUJ.sum(2), C) - _sum_pairs(grad_PUJ.sum(1), C)


def _sum_decay_grads(inside_PC: torch.Tensor, exit_PC: torch.Tensor, carry_P: torch.Tensor) -> torch.Tensor:
    """d(log decay) of token t: what its chunk's tokens i >= t, exits of tokens j < t and the carry contribute.

    Exits are summed forwards: as a difference from their total, the small ones would drown in the large ones.
    """
    return inside_PC.flip(1).cumsum(1).flip(1) + F.pad(exit_PC, (1, -1)).cumsum(1) + carry_P[:, None]
