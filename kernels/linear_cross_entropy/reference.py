"""Cross-entropy of a linear head, the definition; its logits are whole.

    loss_n = log sum_v exp(h_n . w_v) - h_n . w_{label_n}       0 where label_n = ignore_index

Dims: N rows (tokens), D model width, V vocabulary.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F

from kernels.checks import check_dtype, check_float, check_num_dims, check_one_of, check_shape, compute_dtype_of

Reduction = Literal["sum", "none"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


def linear_cross_entropy_reference(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "sum",
) -> torch.Tensor:
    """Loss in nats of the head `weight_VD` on rows `hidden_ND`, both of one dtype.

    labels_N: int64 in [0, V), or ignore_index: no loss and no gradient. Returns the sum, or (N,) for "none", in fp32
    (fp64 for fp64 inputs), as are the logits. Raises ValueError on shapes and dtypes that do not fit.
    """
    check_linear_cross_entropy_inputs(hidden_ND, weight_VD, labels_N, reduction)
    dtype = compute_dtype_of(hidden_ND)
    logits_NV = F.linear(hidden_ND.to(dtype), weight_VD.to(dtype))
    return F.cross_entropy(logits_NV, labels_N, ignore_index=ignore_index, reduction=reduction)


def check_linear_cross_entropy_inputs(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor, reduction: Reduction
) -> None:
    """Raise ValueError unless the loss's tensors fit together."""
    check_num_dims("hidden_ND", hidden_ND, "ND")
    check_float("hidden_ND", hidden_ND)
    check_num_dims("weight_VD", weight_VD, "VD")
    check_shape("weight_VD", weight_VD, "(V, D)", (weight_VD.shape[0], hidden_ND.shape[1]))
    check_dtype("weight_VD", weight_VD, hidden_ND.dtype)
    check_shape("labels_N", labels_N, "(N,)", (hidden_ND.shape[0],))
    check_dtype("labels_N", labels_N, torch.int64)
    check_one_of("reduction", reduction, REDUCTIONS)
