"""Runs that are killed at moments drawn by seed and resumed: their records equal those of runs left alone."""
