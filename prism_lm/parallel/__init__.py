"""Parallelism put on a model from outside."""
