"""Cross-entropy of a linear head over chunks of rows, all between two matrix products in one Triton kernel.

The kernel reads a chunk's fp32 logits twice, once for the sum of exponentials and once to write the gradient
softmax - onehot, times the loss's gradient, in the products' dtype; the contract of chunked.py otherwise.

Dims: N rows (tokens), D model width, V vocabulary, R rows of one chunk.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels import allocate
from kernels.checks import check_no_fp64, check_on_gpu
from kernels.linear_cross_entropy.reference import Reduction, check_linear_cross_entropy_inputs

MAX_CHUNK_LOGITS = 2**27  # 512 MiB of fp32: large products, and few sums over the weight's gradient
BLOCK = 4096


@triton.jit
def row_loss_kernel(
    p_logits, p_target, p_grad_loss, p_loss, p_error, V, IGNORED,
    BLOCK: tl.constexpr, HAS_GRAD: tl.constexpr,
):  # fmt: skip
    """The loss of one row and, where that of the loss is given, the gradient of its logits."""
    i_row = tl.program_id(0).to(tl.int64)
    i_target = tl.load(p_target + i_row)
    p_logits += i_row * V
    o_v = tl.arange(0, BLOCK)
    b_max, b_sum = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for i_v in range(0, V, BLOCK):
        b_logit = tl.load(p_logits + i_v + o_v, mask=i_v + o_v < V, other=float("-inf"))
        b_new = tl.maximum(b_max, b_logit)
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp(b_max - b_shift) + tl.exp(b_logit - b_shift)
        b_max = b_new
    row_max = tl.max(b_max, 0)
    total = tl.sum(b_sum * tl.exp(b_max - row_max), 0)
    is_valid = i_target != IGNORED
    target_logit = tl.load(p_logits + i_target, mask=is_valid, other=0.0)
    tl.store(p_loss + i_row, tl.where(is_valid, tl.log(total) + row_max - target_logit, 0.0))
    if HAS_GRAD:
        grad = tl.where(is_valid, tl.load(p_grad_loss + i_row), 0.0)
        scale = grad / total
        p_error += i_row * V
        for i_v in range(0, V, BLOCK):
            b_logit = tl.load(p_logits + i_v + o_v, mask=i_v + o_v < V, other=float("-inf"))
            b_error = tl.exp(b_logit - row_max) * scale - tl.where(i_v + o_v == i_target, grad, 0.0)
            tl.store(p_error + i_v + o_v, b_error.to(p_error.dtype.element_ty), mask=i_v + o_v < V)


def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "sum",
) -> torch.Tensor:
    """Loss in nats; arguments, results and errors of `linear_cross_entropy_reference`.

    Differentiable once; of a sum, one backward a forward. Raises ValueError for fp64 and off the GPU.
    """
    check_linear_cross_entropy_inputs(hidden_ND, weight_VD, labels_N, reduction)
    tensors = {"hidden_ND": hidden_ND, "weight_VD": weight_VD, "labels_N": labels_N}
    check_on_gpu("linear_cross_entropy", "the one of chunked.py", tensors)
    check_no_fp64("hidden_ND", hidden_ND, "the one of chunked.py")
    if reduction == "sum":
        return _SumLoss.apply(hidden_ND, weight_VD, labels_N, ignore_index, torch.is_grad_enabled())
    return _RowLoss.apply(hidden_ND, weight_VD, labels_N, ignore_index)


class _SumLoss(torch.autograd.Function):
    """The gradients are computed in the forward, where the logits are at hand; the backward scales them."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, ignore_index, with_grads):
        ones_N = hidden_ND.new_ones(labels_N.shape, dtype=torch.float32) if with_grads else None
        loss_N, grad_ND, grad_VD = _walk_chunks(hidden_ND, weight_VD, labels_N, ignore_index, ones_N)
        ctx.save_for_backward(grad_ND, grad_VD)
        return loss_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        grad_ND, grad_VD = ctx.saved_tensors
        return (grad_ND * grad_loss).to(grad_ND.dtype), (grad_VD * grad_loss).to(grad_VD.dtype), None, None, None


class _RowLoss(torch.autograd.Function):
    """Keeps its inputs and computes the logits again in the backward."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, ignore_index):
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N)
        ctx.ignore_index = ignore_index
        return _walk_chunks(hidden_ND, weight_VD, labels_N, ignore_index, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss_N):
        _, grad_ND, grad_VD = _walk_chunks(*ctx.saved_tensors, ctx.ignore_index, grad_loss_N.float().contiguous())
        return grad_ND, grad_VD, None, None


def _walk_chunks(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    ignore_index: int,
    grad_loss_N: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Losses (N,), and if grad_loss_N is given the gradients of hidden and weight, in the inputs' dtype."""
    (N, V), operand = (hidden_ND.shape[0], weight_VD.shape[0]), _operand_dtype(hidden_ND)
    weight = weight_VD.to(operand)
    loss_N = allocate.allocate(N, like=hidden_ND, dtype=torch.float32)
    grad_ND = allocate.allocate(*hidden_ND.shape, like=hidden_ND) if grad_loss_N is not None else None
    grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if grad_loss_N is not None else None
    num_rows = max(1, MAX_CHUNK_LOGITS // V)
    for start in range(0, N, num_rows):
        rows = slice(start, start + num_rows)
        hidden_RD = hidden_ND[rows].to(operand)
        logits_RV = _matmul(hidden_RD, weight.T)
        grad_loss_R = None if grad_loss_N is None else grad_loss_N[rows]
        error_RV = _launch(logits_RV, labels_N[rows], grad_loss_R, loss_N[rows], ignore_index, operand)
        if grad_ND is not None and grad_VD is not None and error_RV is not None:
            grad_ND[rows] = (error_RV @ weight).to(grad_ND.dtype)
            grad_VD += _matmul(error_RV.T, hidden_RD)
    return loss_N, grad_ND, None if grad_VD is None else grad_VD.to(weight_VD.dtype)


def _launch(
    logits_RV: torch.Tensor,
    labels_R: torch.Tensor,
    grad_loss_R: torch.Tensor | None,
    loss_R: torch.Tensor,
    ignore_index: int,
    operand: torch.dtype,
) -> torch.Tensor | None:
    """Fills loss_R; returns the logits' gradient where that of the loss is given."""
    R, V = logits_RV.shape
    error_RV = None if grad_loss_R is None else allocate.allocate(R, V, like=logits_RV, dtype=operand)
    row_loss_kernel[(R,)](
        logits_RV, labels_R.contiguous(), grad_loss_R, loss_R, error_RV, V, ignore_index,
        BLOCK=min(BLOCK, triton.next_power_of_2(V)), HAS_GRAD=grad_loss_R is not None, num_warps=8,
    )  # fmt: skip
    return error_RV


def _operand_dtype(hidden_ND: torch.Tensor) -> torch.dtype:
    """What the matrix products read: bf16 on a GPU as it is, everything else in fp32."""
    is_narrow = hidden_ND.is_cuda and hidden_ND.dtype == torch.bfloat16
    return torch.bfloat16 if is_narrow else torch.float32


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product accumulated and returned in fp32."""
    return left @ right if left.dtype == torch.float32 else torch.mm(left, right, out_dtype=torch.float32)
