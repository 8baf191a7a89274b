"""Means over seeds and their intervals by Student's t-distribution, in plain Python."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and the half width of its interval."""

    mean: float
    half_width: float | None
    "None: one value has no spread."
    count: int


def compute_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """The mean of independent, roughly normal values; its t-interval covers the true mean at the given level."""
    count, mean = len(values), math.fsum(values) / len(values)
    if count < 2:
        return Interval(mean=mean, half_width=None, count=count)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Interval(mean=mean, half_width=t_quantile(level, count - 1) * deviation / math.sqrt(count), count=count)


def t_quantile(level: float, degrees: int) -> float:
    """The t that a share `level` of Student's distribution lies within, -t to t. By bisection of a sum that is exact
    for whole degrees of freedom."""
    if not 0 < level < 1 or degrees < 1:
        raise ValueError(f"level={level} must lie between 0 and 1, and degrees={degrees} must be at least 1")
    low, high = 0.0, 1.0
    while _share_within(high, degrees) < level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, degrees) < level else (low, middle)
    return (low + high) / 2


def _share_within(t: float, degrees: int) -> float:
    """The probability of -t to t: a finite sum of powers of the cosine (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = degrees % 2 == 1
    term, total = (cosine if is_odd else 1.0), 0.0
    for power in range(1 if is_odd else 0, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
