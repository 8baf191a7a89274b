"""Learning rate as a pure function of the step."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Shape of the learning rate over the run; its peak is train.optim.learning_rate, its length train.steps."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    "cosine: half a cosine to the final value. wsd: warm-up, stable, then decay over decay_steps. constant: no decay."
    warmup_steps: int = 100
    "Steps over which the rate rises linearly from 0 to its peak; 0 starts at the peak. Below train.steps."
    decay_steps: int = 0
    "wsd only: length of the decay at the end of the run, in steps; 0 means a fifth of train.steps."
    final_fraction: float = 0.1
    "Rate at the end of the run as a fraction of the peak, 0 to 1."

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"train.schedule.warmup_steps={self.warmup_steps} must be at least 0; use 0 for none")
        if self.decay_steps < 0:
            raise ValueError(
                f"train.schedule.decay_steps={self.decay_steps} must be at least 0; use 0 for a fifth of train.steps"
            )
        if not 0.0 <= self.final_fraction <= 1.0:
            raise ValueError(
                f"train.schedule.final_fraction={self.final_fraction} must lie in 0 to 1; use 0.1 for a tenth"
            )


def compute_rate_fraction(config: ScheduleConfig, *, step: int, total_steps: int) -> float:
    """The learning rate of update `step` (0-based, below total_steps) as a fraction of the peak, in [0, 1].

    It is 0 only at the end of a decay to final_fraction 0.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    decay_start, decay_length = _find_decay(config, total_steps)
    progress = min(1.0, max(0.0, (step + 1 - decay_start) / decay_length))
    match config.kind:
        case "constant":
            return 1.0
        case "cosine":
            shape = 0.5 * (1.0 + math.cos(math.pi * progress))
        case "wsd":
            shape = 1.0 - math.sqrt(progress)
    return config.final_fraction + (1.0 - config.final_fraction) * shape


def _find_decay(config: ScheduleConfig, total_steps: int) -> tuple[int, int]:
    after_warmup = max(1, total_steps - config.warmup_steps)
    if config.kind != "wsd":
        return config.warmup_steps, after_warmup
    length = min(after_warmup, config.decay_steps or max(1, total_steps // 5))
    return total_steps - length, length
