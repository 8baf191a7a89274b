"""The PRISM scan on a GPU: the exact chunk form in Triton, forward and backward, behind the references' signature.

Two custom operators, `prism::chunk_scan` and `prism::chunk_scan_backward`, so that compilers see one node each. The
solver's loop is fused on both ways: besides its inputs the forward keeps, for each chunk, T, w, V' and the state at its
start (kernels/README.md), and of the pairs from the second on E_l and T B_l in the inputs' dtype.

Dims: B batch, T tokens, H heads, K key width, V value width, L solver steps, M written pairs, C tokens in a chunk,
P = B H ceil(T / C) chunks of all rows and heads.
"""

import torch
from torch import Tensor

from kernels.checks import check_at_least, check_at_most, check_dtype, check_multiple, check_no_fp64, check_on_gpu
from kernels.prism.activation import Activation
from kernels.prism.chunk_bwd import run_backward
from kernels.prism.chunk_bwd_writes import Saved
from kernels.prism.chunk_fwd import Decays, Forward, Solved, run_forward
from kernels.prism.reference import check_scan_inputs, check_scan_state

PLAIN = "prism_scan_chunked"
NAMES = (
    "query_BTHK", "key_BTMHK", "residual_BTHV", "gain_BTLHV", "step_size_BTMH", "log_decay_BTH",
    "entry_state_BHVK", "document_start_BT",
)  # fmt: skip
MAX_WIDTH, WIDTH_MULTIPLE, MAX_PAIRS = 256, 16, 4
CHUNK_TOKENS = (64, 32, 16)
# In fp32 a chunk of 64 would not fit in shared memory.
MAX_FP32_CHUNK_TOKENS = 32


def prism_scan(
    query_BTHK: Tensor,
    key_BTMHK: Tensor,
    residual_BTHV: Tensor,
    gain_BTLHV: Tensor | None,
    step_size_BTMH: Tensor,
    log_decay_BTH: Tensor,
    *,
    activation: Activation = "gelu",
    entry_state_BHVK: Tensor | None = None,
    document_start_BT: Tensor | None = None,
    chunk_tokens: int = 64,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over T tokens on the GPU; the arguments and results of `prism_scan_reference`.

    Query, key, residual and gain share one dtype, fp32, fp16 or bf16; products are accumulated in fp32 and the state is
    carried in it; step sizes, log decays and the entry state may be any float. K and V: multiples of 16 up to 256.
    chunk_tokens, 16 or more, bounds the kernels' own chunk of 64, 32 or 16. Tensors that are not contiguous are copied.
    Differentiable once, in every tensor argument but document_start_BT. The same inputs give the same bits.

    Raises ValueError on shapes, dtypes and devices that do not fit; `prism_scan_chunked` takes the rest.
    """
    tensors = (query_BTHK, key_BTMHK, residual_BTHV, gain_BTLHV, step_size_BTMH, log_decay_BTH)
    given = (*tensors, entry_state_BHVK, document_start_BT)
    check_kernel_inputs("prism_scan", PLAIN, given, activation, chunk_tokens)
    chunk = choose_chunk(query_BTHK.dtype, chunk_tokens)
    out_BTHV, final_BHVK, *_ = chunk_scan(*make_contiguous(given), activation == "gelu", chunk)
    return out_BTHV, final_BHVK


def check_kernel_inputs(
    operator: str, plain: str, given: tuple[Tensor | None, ...], activation: Activation, chunk_tokens: int
) -> None:
    """Raise ValueError unless the kernels can take the tensors of a scan, in the order of NAMES; `plain` names the form
    of `operator` that takes the rest."""
    query, key, residual, gain, _, _, entry_state, document_start = given
    check_scan_inputs(*given[:6], activation)
    check_scan_state(query, residual, entry_state, document_start, chunk_tokens)
    _check_kernel_limits(plain, query, key, residual, gain, chunk_tokens)
    check_on_gpu(operator, plain, dict(zip(NAMES, given, strict=True)))


def choose_chunk(dtype: torch.dtype, chunk_tokens: int) -> int:
    """The kernels' own chunk, at most chunk_tokens."""
    limit = MAX_FP32_CHUNK_TOKENS if dtype == torch.float32 else CHUNK_TOKENS[0]
    return next(size for size in CHUNK_TOKENS if size <= min(chunk_tokens, limit))


def make_contiguous(given: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Copies of the tensors that are not contiguous, and the others."""
    return [None if tensor is None else tensor.contiguous() for tensor in given]


def _check_kernel_limits(
    plain: str, query: Tensor, key: Tensor, residual: Tensor, gain: Tensor | None, chunk_tokens: int
) -> None:
    check_no_fp64("query_BTHK", query, plain)
    for name, tensor in (("key_BTMHK", key), ("residual_BTHV", residual), ("gain_BTLHV", gain)):
        if tensor is not None:
            check_dtype(name, tensor, query.dtype)
    check_multiple("query_BTHK.shape[3]", query.shape[3], WIDTH_MULTIPLE, MAX_WIDTH)
    check_multiple("residual_BTHV.shape[3]", residual.shape[3], WIDTH_MULTIPLE, MAX_WIDTH)
    check_at_most("key_BTMHK.shape[2]", key.shape[2], MAX_PAIRS)
    check_at_least("chunk_tokens", chunk_tokens, CHUNK_TOKENS[-1])


@torch.library.custom_op("prism::chunk_scan", mutates_args=())
def chunk_scan(
    query: Tensor, key: Tensor, residual: Tensor, gain: Tensor | None, step_size: Tensor, log_decay: Tensor,
    entry_state: Tensor | None, document_start: Tensor | None, gelu: bool, chunk_tokens: int,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """`prism_scan` on contiguous tensors: output, final state, then what the backward reads: four vectors of decays,
    T (P, C, C), -w (P, C, K), -T B_l (P, M - 1, C, C), V' (P, V, C), E_l (P, M - 1, V, C), states (P, V, K)."""
    forward = run_forward(
        query, key, residual, gain, step_size, log_decay, entry_state, document_start,
        gelu=gelu, chunk_tokens=chunk_tokens,
    )  # fmt: skip
    return _flatten(forward)


def _flatten(forward: Forward) -> tuple[Tensor, ...]:
    return (forward.out_BTHV, forward.final_BHVK, *forward.decays, *forward.solved)


@chunk_scan.register_fake
def _(query, key, residual, gain, step_size, log_decay, entry_state, document_start, gelu, chunk_tokens):
    (B, T, H, K), M, V, C = query.shape, key.shape[2], residual.shape[-1], chunk_tokens
    P = B * H * ((T + C - 1) // C)
    wide = torch.float64 if query.dtype == torch.float32 else torch.float32
    vectors = [query.new_empty(P, C, dtype=dtype) for dtype in (wide, torch.float32, torch.float32)]
    carry = query.new_empty(P, dtype=torch.float32)
    matrices = [query.new_empty(P, *sizes) for sizes in ((C, C), (C, K), (M - 1, C, C), (V, C), (M - 1, V, C), (V, K))]
    final = query.new_empty(B, H, V, K, dtype=torch.float32)
    return (query.new_empty(B, T, H, V), final, *vectors, carry, *matrices)


@torch.library.custom_op("prism::chunk_scan_backward", mutates_args=())
def chunk_scan_backward(
    grad_out: Tensor, grad_final: Tensor | None,
    query: Tensor, key: Tensor, residual: Tensor, gain: Tensor | None, step_size: Tensor, document_start: Tensor | None,
    total: Tensor, entry: Tensor, exit: Tensor, carry: Tensor,
    inverse: Tensor, w: Tensor, forget: Tensor, value: Tensor, write: Tensor, state: Tensor,
    gelu: bool, chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, residual, gain, step size, log decay and entry state; the last three in fp32."""
    decays, solved = Decays(total, entry, exit, carry), Solved(inverse, w, forget, value, write, state)
    saved = Saved(query, key, residual, gain, step_size, document_start, decays, solved)
    return tuple(run_backward(saved, grad_out, grad_final, gelu=gelu, chunk_tokens=chunk_tokens))


@chunk_scan_backward.register_fake
def _(
    grad_out, grad_final, query, key, residual, gain, step_size, document_start,
    total, entry, exit, carry, inverse, w, forget, value, write, state, gelu, chunk_tokens,
):  # fmt: skip
    grads = [torch.empty_like(x) for x in (query, key, residual, residual if gain is None else gain)]
    vectors = [torch.empty_like(x, dtype=torch.float32) for x in (step_size, query[..., 0])]
    B, _, H, K = query.shape
    return (*grads, *vectors, query.new_empty(B, H, residual.shape[-1], K, dtype=torch.float32))


def _save(ctx, inputs, output):
    query, key, residual, gain, step_size, log_decay, entry_state, document_start, ctx.gelu, ctx.chunk_tokens = inputs
    ctx.dtypes = step_size.dtype, log_decay.dtype, None if entry_state is None else entry_state.dtype
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(query, key, residual, gain, step_size, document_start, *output[2:])


def _backward(ctx, grad_out, grad_final, *_):
    query, key, residual, gain, *rest = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(residual)
    grad_final = None if grad_final is None else grad_final.contiguous()
    grads = chunk_scan_backward(
        grad_out.contiguous(), grad_final, query, key, residual, gain, *rest, ctx.gelu, ctx.chunk_tokens
    )
    step_dtype, decay_dtype, entry_dtype = ctx.dtypes
    grad_entry = None if entry_dtype is None else grads[6].to(entry_dtype)
    grad_gain = None if gain is None else grads[3]
    return (*grads[:3], grad_gain, grads[4].to(step_dtype), grads[5].to(decay_dtype), grad_entry, None, None, None)


chunk_scan.register_autograd(_backward, setup_context=_save)
