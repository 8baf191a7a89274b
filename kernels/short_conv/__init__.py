"""Causal depthwise convolution over a few tokens, followed by SiLU.

- `reference.py` `short_conv_reference`: the loop over tokens.
- `shifted.py` `short_conv_shifted`: a sum of shifted copies in plain torch, with its own backward; runs anywhere.
- `fused.py` `short_conv`: one Triton kernel each way.
"""
