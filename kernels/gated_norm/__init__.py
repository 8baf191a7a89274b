"""RMS norm with a learned scale and a SiLU gate.

- `reference.py` `gated_rms_norm_reference`: the formula, left to autograd.
- `explicit.py` `gated_rms_norm_explicit`: the same with its own backward, which keeps the inputs only; runs anywhere.
- `fused.py` `gated_rms_norm`: one Triton kernel each way.
"""
