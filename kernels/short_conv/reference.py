"""Causal depthwise convolution over W tokens and SiLU, as a loop over tokens: the definition.

    y_t = SiLU(sum_{j=0}^{W-1} weight_{., j} x_{t-W+1+j})       inputs before the token's document count as zero

so weight[:, W-1] multiplies the token itself. Dims: B batch, T tokens, D width, W conv width.
"""

import torch
import torch.nn.functional as F

from kernels.checks import check_at_least, check_dtype, check_float, check_num_dims, check_shape, compute_dtype_of


def short_conv_reference(
    x_BTD: torch.Tensor,
    weight_DW: torch.Tensor,
    *,
    entry_BWD: torch.Tensor | None = None,
    document_start_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve T tokens that follow the window `entry_BWD`.

    entry_BWD: the W-1 inputs before the first token, oldest first, zero where they belong to no or another document;
    None means none. document_start_BT: bool, True where a token begins a document.

    Returns SiLU of the convolution (B, T, D) and the window to continue from (B, W-1, D), both in x's dtype; computed
    in fp32 (fp64 for fp64 inputs). Raises ValueError on shapes and dtypes that do not fit.
    """
    check_short_conv_inputs(x_BTD, weight_DW, entry_BWD, document_start_BT)
    dtype = compute_dtype_of(x_BTD)
    (B, T, D), W = x_BTD.shape, weight_DW.shape[1]
    window_BWD = x_BTD.new_zeros(B, W - 1, D) if entry_BWD is None else entry_BWD
    outputs = []
    for t in range(T):
        if document_start_BT is not None:
            window_BWD = torch.where(document_start_BT[:, t, None, None], torch.zeros_like(window_BWD), window_BWD)
        seen_BWD = torch.cat([window_BWD, x_BTD[:, t : t + 1]], dim=1)
        outputs.append(F.silu(torch.einsum("bwd,dw->bd", seen_BWD.to(dtype), weight_DW.to(dtype))))
        window_BWD = seen_BWD[:, 1:]
    return torch.stack(outputs, dim=1).to(x_BTD.dtype), window_BWD


def check_short_conv_inputs(
    x_BTD: torch.Tensor,
    weight_DW: torch.Tensor,
    entry_BWD: torch.Tensor | None,
    document_start_BT: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the convolution's tensors fit together."""
    check_num_dims("x_BTD", x_BTD, "BTD")
    check_num_dims("weight_DW", weight_DW, "DW")
    check_float("x_BTD", x_BTD)
    (B, T, D), W = x_BTD.shape, weight_DW.shape[1]
    check_at_least("x_BTD.shape[1]", T, 1)
    check_at_least("weight_DW.shape[1]", W, 1)
    check_shape("weight_DW", weight_DW, "(D, W)", (D, W))
    if entry_BWD is not None:
        check_shape("entry_BWD", entry_BWD, "(B, W-1, D)", (B, W - 1, D))
        check_dtype("entry_BWD", entry_BWD, x_BTD.dtype)
    if document_start_BT is not None:
        check_shape("document_start_BT", document_start_BT, "(B, T)", (B, T))
        check_dtype("document_start_BT", document_start_BT, torch.bool)
