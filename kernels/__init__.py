"""Operators of PRISM, one folder each; import them from their own modules."""
