"""Cross-entropy of a linear head without the whole logits.

- `reference.py` `linear_cross_entropy_reference`: the formula with whole logits.
- `chunked.py` `linear_cross_entropy`: rows in chunks, by torch's own operator where it is exact enough.
- `fused.py` `linear_cross_entropy`: rows in chunks, one Triton kernel between the matrix products.
"""
