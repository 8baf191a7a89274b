"""Cross-entropy of a linear head over chunks of rows: no more than one chunk's logits exist, forward or backward.

Two forms of one contract:
- torch's `torch.nn.functional.linear_cross_entropy` (torch >= 2.13) for the sum of fp32 or fp64 rows in eager mode;
- our own otherwise: torch sums and returns a bf16 loss in bf16 (three digits), leaves the graph under torch.compile,
  and older torches have none.

Both compute the gradients of a sum in the forward, where the logits are at hand: the backward only scales them and
reads no parameter, and one gradient of the head's size is held until then. "none" keeps its inputs instead and
computes the logits again in the backward.

Dims: N rows (tokens), D model width, V vocabulary, R rows of one chunk.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels.checks import compute_dtype_of
from kernels.linear_cross_entropy.reference import Reduction, check_linear_cross_entropy_inputs

MAX_CHUNK_LOGITS_CPU = 2**22  # 16 MiB of fp32: stays near the caches
MAX_CHUNK_LOGITS_GPU = 2**26  # 256 MiB of fp32: large products


def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "sum",
) -> torch.Tensor:
    """Loss in nats; arguments, results and errors of `linear_cross_entropy_reference`.

    Differentiable once; of a sum, one backward a forward.
    """
    check_linear_cross_entropy_inputs(hidden_ND, weight_VD, labels_N, reduction)
    exact_in_torch = hidden_ND.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling()
    if reduction == "sum" and exact_in_torch and has_torch_operator():
        return sum_loss_by_torch(hidden_ND, weight_VD, labels_N, ignore_index)
    if reduction == "sum":
        return _SumLoss.apply(hidden_ND, weight_VD, labels_N, ignore_index, torch.is_grad_enabled())
    return _RowLoss.apply(hidden_ND, weight_VD, labels_N, ignore_index)


def has_torch_operator() -> bool:
    """Whether this torch has the operator with its chunked path."""
    return hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")


def sum_loss_by_torch(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """The sum by torch's chunked path."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(
        hidden_ND, weight_VD, labels_N, reduction="sum", ignore_index=ignore_index, options=options
    )


class _SumLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, ignore_index, with_grads):
        ones_N = hidden_ND.new_ones(labels_N.shape, dtype=compute_dtype_of(hidden_ND)) if with_grads else None
        loss_N, grad_ND, grad_VD = _walk_chunks(hidden_ND, weight_VD, labels_N, ignore_index, ones_N)
        ctx.save_for_backward(grad_ND, grad_VD)
        return loss_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        grad_ND, grad_VD = ctx.saved_tensors
        return (grad_ND * grad_loss).to(grad_ND.dtype), (grad_VD * grad_loss).to(grad_VD.dtype), None, None, None


class _RowLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, ignore_index):
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N)
        ctx.ignore_index = ignore_index
        return _walk_chunks(hidden_ND, weight_VD, labels_N, ignore_index, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss_N):
        _, grad_ND, grad_VD = _walk_chunks(*ctx.saved_tensors, ctx.ignore_index, grad_loss_N)
        return grad_ND, grad_VD, None, None


def _walk_chunks(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    ignore_index: int,
    grad_loss_N: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Losses (N,), and if grad_loss_N is given the gradients of hidden and weight, in the inputs' dtype."""
    dtype = compute_dtype_of(hidden_ND)
    operand = torch.bfloat16 if hidden_ND.is_cuda and hidden_ND.dtype == torch.bfloat16 else dtype
    weight = weight_VD.to(operand)
    valid_N = labels_N != ignore_index
    target_N = torch.where(valid_N, labels_N, 0)
    loss_N = hidden_ND.new_zeros(labels_N.shape, dtype=dtype)
    if grad_loss_N is not None:
        grad_loss_N = torch.where(valid_N, grad_loss_N.to(dtype), 0)
        grad_ND, grad_VD = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD, dtype=dtype)
    for rows in _row_chunks(hidden_ND, weight_VD.shape[0]):
        hidden_RD, target_R1 = hidden_ND[rows].to(operand), target_N[rows, None]
        logits_RV = _matmul(hidden_RD, weight.T, dtype)
        logits_RV.sub_(logits_RV.amax(1, keepdim=True))
        target_logit_R1 = logits_RV.gather(1, target_R1)
        total_R1 = logits_RV.exp_().sum(1, keepdim=True)
        loss_N[rows] = (total_R1.log() - target_logit_R1).squeeze(1)
        if grad_loss_N is None:
            continue
        grad_R1 = grad_loss_N[rows, None]
        error_RV = logits_RV.mul_(grad_R1 / total_R1).scatter_add_(1, target_R1, -grad_R1).to(operand)
        grad_ND[rows] = (error_RV @ weight).to(grad_ND.dtype)
        grad_VD += _matmul(error_RV.T, hidden_RD, dtype)
    loss_N = torch.where(valid_N, loss_N, 0)
    return (loss_N, None, None) if grad_loss_N is None else (loss_N, grad_ND, grad_VD.to(weight_VD.dtype))


def _row_chunks(hidden_ND: torch.Tensor, V: int) -> list[slice]:
    max_logits = MAX_CHUNK_LOGITS_GPU if hidden_ND.is_cuda else MAX_CHUNK_LOGITS_CPU
    num_rows = max(1, max_logits // V)
    return [slice(start, start + num_rows) for start in range(0, hidden_ND.shape[0], num_rows)]


def _matmul(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product accumulated and returned in `dtype`."""
    return left @ right if left.dtype == dtype else torch.mm(left, right, out_dtype=dtype)
