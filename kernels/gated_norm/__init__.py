"""RMS norm with a learned scale and a SiLU gate.

- `reference.py` `gated_rms_norm_reference`: the formula, left to autograd.
- `fused.py` `gated_rms_norm`: the same with its own backward, which keeps the inputs only.
"""
