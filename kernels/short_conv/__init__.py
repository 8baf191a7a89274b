"""Causal depthwise convolution over a few tokens, followed by SiLU.

- `reference.py` `short_conv_reference`: the loop over tokens.
- `shifted.py` `short_conv`: a sum of shifted copies, with its own backward.
"""
