"""Which losses stand so far above those before them that their step is better left out."""

from dataclasses import dataclass, field
from statistics import median

NORMAL_SCALE = 1.4826
"Times the median absolute deviation, the standard deviation of a normal distribution."
LEAST_SCALE_NATS = 0.02
"Losses that hardly differ would make an ordinary one look far away."


@dataclass(frozen=True, kw_only=True)
class SpikeGuard:
    """A threshold from the losses of the last applied steps; with window_steps=0 there is none."""

    window_steps: int
    "Losses that decide; with fewer of them there is no threshold yet."
    deviations: float
    "How far above their median the threshold lies, in robust standard deviations."
    losses: list[float] = field(default_factory=list[float])
    "Of applied steps, in nats, oldest first."

    def threshold(self) -> float:
        """The largest loss that is still applied, in nats: the median of the window plus `deviations` times 1.4826 of
        its median absolute deviation, or 0.02 nats where that is more; infinite until the window is full."""
        window = self.losses[-self.window_steps :] if self.window_steps else []
        if not window or len(window) < self.window_steps:
            return float("inf")
        middle = median(window)
        scale_nats = NORMAL_SCALE * median(abs(loss - middle) for loss in window)
        return middle + self.deviations * max(scale_nats, LEAST_SCALE_NATS)

    def extend(self, loss_nats: float) -> list[float]:
        """The window after a step with this loss was applied."""
        return [*self.losses, loss_nats][-self.window_steps :] if self.window_steps else []
