"""Keys of norm 1: a first one and further ones of every head, normalised into one tensor.

- `reference.py` `unit_keys_reference`: the formula in plain torch.
- `fused.py` `unit_keys`: Triton, one pass forward and one backward.
"""
