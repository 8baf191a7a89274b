"""SiLU(gate) * up of gate and up side by side.

- `reference.py` `swiglu_reference`: the formula in plain torch.
- `fused.py` `swiglu`: Triton, one pass forward and one backward.
"""
