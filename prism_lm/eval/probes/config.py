"""How a probe is trained. Importing this file loads no torch."""

import math
from dataclasses import dataclass

LOWEST_RATE = 0.05


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """One recipe for every model and task."""

    steps: int = 400
    "Steps of AdamW, at least 1."
    batch_rows: int = 32
    "Fresh rows of 128 tokens a step."
    learning_rate: float = 1e-2
    "Peak, reached after the warm-up; falls to a twentieth by a cosine."
    warmup_share: float = 0.1
    "Share of the steps over which the rate rises linearly, in [0, 1)."
    weight_decay: float = 0.01
    "Decoupled decay of matrices; vectors and the embedding do not decay."
    clip_norm: float = 1.0
    "Norm to which a gradient is cut."
    heldout_rows: int = 512
    "Rows that are scored after training."

    def __post_init__(self) -> None:
        for name in ("steps", "batch_rows", "heldout_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')}={getattr(self, name)} must be at least 1; leave it out")
        if not self.learning_rate > 0:
            raise ValueError(f"--learning-rate={self.learning_rate} must be above 0; leave it out for the default")

    def scale_rate(self, step: int) -> float:
        """The share of the peak rate at a step, counted from 1."""
        warmup = self.warmup_share * self.steps
        if step < warmup:
            return step / warmup
        done = (step - warmup) / max(1.0, self.steps - warmup)
        return LOWEST_RATE + (1 - LOWEST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
