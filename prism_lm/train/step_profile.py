"""Where the GPU time of a training step goes, by kind of work, from torch's profiler."""

import re
from collections import Counter
from typing import Any

import torch

from prism_lm.train.bench import UPDATE_REGION, Stepper

# The first kind whose pattern is found in a kernel's name or in those of the operations around it.
KINDS = (
    ("optimizer", re.compile(UPDATE_REGION)),
    ("loss", re.compile(r"CrossEntropy|cross_entropy|_SumLoss|_RowLoss|row_loss|log_softmax|nll_loss")),
    ("scan", re.compile(r"prism::chunk_scan|DeltaRule|delta_rule|prepare_wy|solve_tril|chunk_\w*(fwd|bwd|cumsum)")),
    ("convolution", re.compile(r"conv", re.IGNORECASE)),
    ("norms", re.compile(r"norm", re.IGNORECASE)),
    ("keys and SwiGLU", re.compile(r"unit_keys|swiglu", re.IGNORECASE)),
    ("matrix products", re.compile(r"aten::(mm|addmm|bmm|baddbmm)\b|gemm|nvjet|cutlass")),
    ("attention", re.compile(r"scaled_dot_product|flash|fmha")),
)
OTHER = "other"
NUM_KERNELS = 12


def profile_step(stepper: Stepper, *, steps: int = 2) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Milliseconds of a step by kind of work, the largest first, and of its largest kernels. Empty without CUDA.

    Kernels of one stream do not overlap: what the sum lacks of the step's time is a GPU that waited.
    """
    if stepper.device.type != "cuda":
        return {}, []
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            stepper()
        torch.cuda.synchronize(stepper.device)
    kinds, kernels = sum_kernels(profile.events())
    kinds_ms, kernels_ms = (
        [(name, 1e-3 * us / steps) for name, us in counts.most_common()] for counts in (kinds, kernels)
    )
    return dict(kinds_ms), kernels_ms[:NUM_KERNELS]


def sum_kernels(events: Any) -> tuple[Counter[str], Counter[str]]:
    """Microseconds of kernels by kind and by name, from a profile's events."""
    kinds: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in events:
        around = _name_operations(event) if event.kernels else ""
        for kernel in event.kernels:
            kinds[find_kind(f"{kernel.name} {around}")] += kernel.duration
            kernels[kernel.name[:90]] += kernel.duration
    return kinds, kernels


def find_kind(names: str) -> str:
    """The kind of work of a kernel, from its name and those of the operations around it."""
    return next((kind for kind, pattern in KINDS if pattern.search(names)), OTHER)


def _name_operations(event: Any) -> str:
    """The operation that launched a kernel and those around it, innermost first."""
    names: list[str] = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return " ".join(names)
