"""The one function that allocates what kernels write, so that tests can fill it with NaN before every launch."""

import torch


def allocate(*sizes: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised contiguous tensor of `sizes` on `like`'s device, in `dtype` (None: `like`'s)."""
    return torch.empty(sizes, device=like.device, dtype=dtype or like.dtype)
