"""Checkpoints: published atomically, found, pruned and loaded."""
