"""Keys of norm 1 in one pass over each source; the equation of reference.py.

With s = rsqrt(sum_K x^2 + 1e-6) and y = x s:

    dx = s (dy - y sum_K dy y)

The first keys may be a slice of a wider projection: tokens any stride apart, heads side by side.

Dims: B batch, T tokens, H heads, K key width, X keys after the first, M = X + 1 written pairs.
"""

import torch
import triton
import triton.language as tl

from kernels import allocate
from kernels.checks import check_no_fp64, check_on_gpu
from kernels.unit_keys.reference import KEY_NORM_EPS, check_unit_keys_inputs

TILE_ELEMENTS = 2048


@triton.jit
def locate_keys(NUM_KEYS, H, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):
    """Token and head of this program's rows, their columns, and which of both exist."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, BK)
    return o_row // H, o_row % H, o_k, (o_row[:, None] < NUM_KEYS) & (o_k[None, :] < K)


@triton.jit(do_not_specialize=["NUM_KEYS"])
def unit_keys_kernel(
    p_x, p_y, NUM_KEYS, H, X_STRIDE, Y_STRIDE, EPS,
    K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of keys divided by their norms."""
    o_token, o_head, o_k, m_tile = locate_keys(NUM_KEYS, H, K, BK, ROWS)
    o_inner = o_head[:, None] * K + o_k[None, :]
    b_x = tl.load(p_x + o_token[:, None] * X_STRIDE + o_inner, mask=m_tile, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) + EPS)[:, None]
    tl.store(p_y + o_token[:, None] * Y_STRIDE + o_inner, b_y.to(p_y.dtype.element_ty), mask=m_tile)


@triton.jit(do_not_specialize=["NUM_KEYS"])
def unit_keys_backward_kernel(
    p_x, p_grad_y, p_grad_x, NUM_KEYS, H, X_STRIDE, Y_STRIDE, EPS,
    K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of keys."""
    o_token, o_head, o_k, m_tile = locate_keys(NUM_KEYS, H, K, BK, ROWS)
    o_inner = o_head[:, None] * K + o_k[None, :]
    b_x = tl.load(p_x + o_token[:, None] * X_STRIDE + o_inner, mask=m_tile, other=0.0).to(tl.float32)
    b_grad = tl.load(p_grad_y + o_token[:, None] * Y_STRIDE + o_inner, mask=m_tile, other=0.0).to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, 1) + EPS)[:, None]
    b_y = b_x * b_scale
    b_grad_x = b_scale * (b_grad - b_y * tl.sum(b_grad * b_y, 1)[:, None])
    p_out = p_grad_x + o_token[:, None] * (H * K) + o_inner
    tl.store(p_out, b_grad_x.to(p_grad_x.dtype.element_ty), mask=m_tile)


def unit_keys(first_BTHK: torch.Tensor, extra_BTXHK: torch.Tensor | None = None) -> torch.Tensor:
    """Normalise the first and the extra keys into one tensor; arguments and result of `unit_keys_reference`.

    Differentiable once. Only the inputs are kept for the backward. Raises ValueError for fp64 and off the GPU.
    """
    check_unit_keys_inputs(first_BTHK, extra_BTXHK)
    tensors = {"first_BTHK": first_BTHK, "extra_BTXHK": extra_BTXHK}
    check_on_gpu("unit_keys", "unit_keys_reference", tensors)
    check_no_fp64("first_BTHK", first_BTHK, "unit_keys_reference")
    return _unit_keys(first_BTHK, extra_BTXHK)


@torch.library.custom_op("prism::unit_keys", mutates_args=())
def _unit_keys(first_BTHK: torch.Tensor, extra_BTXHK: torch.Tensor | None) -> torch.Tensor:
    (B, T, H, K), X = first_BTHK.shape, _count_extra(extra_BTXHK)
    key_BTMHK = allocate.allocate(B, T, X + 1, H, K, like=first_BTHK)
    for m, source in _list_sources(first_BTHK, extra_BTXHK):
        num_keys, heads, block, rows = _plan(source, K)
        grid = (triton.cdiv(num_keys, rows),)
        target = key_BTMHK[:, :, m:]
        strides = (source.stride(1), key_BTMHK.stride(1))
        unit_keys_kernel[grid](source, target, num_keys, heads, *strides, KEY_NORM_EPS, K=K, BK=block, ROWS=rows)
    return key_BTMHK


@torch.library.custom_op("prism::unit_keys_backward", mutates_args=())
def _unit_keys_backward(
    grad_BTMHK: torch.Tensor, first_BTHK: torch.Tensor, extra_BTXHK: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_BTMHK, K = grad_BTMHK.contiguous(), first_BTHK.shape[-1]
    grads = [allocate.allocate(*first_BTHK.shape, like=first_BTHK)]
    grads.append(allocate.allocate(*_extra_shape(first_BTHK, extra_BTXHK), like=first_BTHK))
    for m, source in _list_sources(first_BTHK, extra_BTXHK):
        num_keys, heads, block, rows = _plan(source, K)
        grid = (triton.cdiv(num_keys, rows),)
        strides = (source.stride(1), grad_BTMHK.stride(1))
        unit_keys_backward_kernel[grid](
            source, grad_BTMHK[:, :, m:], grads[m], num_keys, heads, *strides, KEY_NORM_EPS, K=K, BK=block, ROWS=rows
        )
    return grads[0], grads[1]


@_unit_keys.register_fake
def _(first_BTHK, extra_BTXHK):
    B, T, H, K = first_BTHK.shape
    return first_BTHK.new_empty(B, T, _count_extra(extra_BTXHK) + 1, H, K)


@_unit_keys_backward.register_fake
def _(grad_BTMHK, first_BTHK, extra_BTXHK):
    return first_BTHK.new_empty(first_BTHK.shape), first_BTHK.new_empty(_extra_shape(first_BTHK, extra_BTXHK))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_BTMHK):
    first_BTHK, extra_BTXHK = ctx.saved_tensors
    grad_BTHK, grad_BTXHK = _unit_keys_backward(grad_BTMHK, first_BTHK, extra_BTXHK)
    return grad_BTHK, None if extra_BTXHK is None else grad_BTXHK


_unit_keys.register_autograd(_backward, setup_context=_save)


def _count_extra(extra_BTXHK: torch.Tensor | None) -> int:
    return 0 if extra_BTXHK is None else extra_BTXHK.shape[2]


def _extra_shape(first_BTHK: torch.Tensor, extra_BTXHK: torch.Tensor | None) -> tuple[int, ...]:
    return (0,) if extra_BTXHK is None else tuple(extra_BTXHK.shape)


def _list_sources(first_BTHK: torch.Tensor, extra_BTXHK: torch.Tensor | None) -> list[tuple[int, torch.Tensor]]:
    """(written pair it begins at, keys (B, T, heads, K) with heads side by side and tokens one stride apart)."""
    sources = [(0, first_BTHK)] if extra_BTXHK is None else [(0, first_BTHK), (1, extra_BTXHK.flatten(2, 3))]
    return [(m, source if _has_even_tokens(source) else source.contiguous()) for m, source in sources]


def _has_even_tokens(source_BTHK: torch.Tensor) -> bool:
    B, T, H, K = source_BTHK.shape
    strides = source_BTHK.stride()
    return strides[3] == 1 and (H == 1 or strides[2] == K) and (B == 1 or strides[0] == T * strides[1])


def _plan(source_BTHK: torch.Tensor, K: int) -> tuple[int, int, int, int]:
    """Keys in all, keys of a token, and the tile: columns and rows of a program."""
    B, T, heads, _ = source_BTHK.shape
    block = triton.next_power_of_2(K)
    return B * T * heads, heads, block, max(1, TILE_ELEMENTS // block)
