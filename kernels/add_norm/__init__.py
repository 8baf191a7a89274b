"""A residual addition and the RMS norm of its sum.

- `reference.py` `add_rms_norm_reference`: the formula in plain torch.
- `fused.py` `add_rms_norm`: Triton, one pass forward and one backward.
"""
