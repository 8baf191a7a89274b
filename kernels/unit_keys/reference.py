"""L2-normalised write keys, the definition.

    y = x / sqrt(sum_K x^2 + 1e-6)          in fp32 or wider: the norm is just below 1, and a zero key stays zero

Dims: B batch, T tokens, H heads, K key width, X keys after the first, M = X + 1 written pairs.
"""

import torch

from kernels.checks import check_dtype, check_float, check_num_dims, check_shape, compute_dtype_of

KEY_NORM_EPS = 1e-6


def unit_keys_reference(first_BTHK: torch.Tensor, extra_BTXHK: torch.Tensor | None = None) -> torch.Tensor:
    """key_BTMHK: the first key, then the extra ones, each of norm 1, in the inputs' dtype.

    Raises ValueError on shapes and dtypes that do not fit.
    """
    check_unit_keys_inputs(first_BTHK, extra_BTXHK)
    key_BTMHK = first_BTHK[:, :, None]
    if extra_BTXHK is not None:
        key_BTMHK = torch.cat([key_BTMHK, extra_BTXHK], dim=2)
    wide = key_BTMHK.to(compute_dtype_of(key_BTMHK))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + KEY_NORM_EPS)).to(first_BTHK.dtype)


def check_unit_keys_inputs(first_BTHK: torch.Tensor, extra_BTXHK: torch.Tensor | None) -> None:
    """Raise ValueError unless the keys fit together."""
    check_num_dims("first_BTHK", first_BTHK, "BTHK")
    check_float("first_BTHK", first_BTHK)
    if extra_BTXHK is not None:
        B, T, H, K = first_BTHK.shape
        check_num_dims("extra_BTXHK", extra_BTXHK, "BTXHK")
        check_shape("extra_BTXHK", extra_BTXHK, "(B, T, X, H, K)", (B, T, extra_BTXHK.shape[2], H, K))
        check_dtype("extra_BTXHK", extra_BTXHK, first_BTHK.dtype)
