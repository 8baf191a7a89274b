"""Tasks scored while a run goes on: which and how often, and what scores them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Tasks of lm-eval, EleutherAI's harness, that are scored during training."""

    every_steps: int = 0
    """Steps between scorings, and one after the last step; 0 means never. Training goes on as if there were none, to
    the bit. All ranks share the work; with train.zero_stage=3 each GPU holds the whole weights meanwhile."""
    names: list[str] = field(default_factory=list[str])
    """Tasks, groups or tags: those that lm-eval ships, whose data must be on this machine or within reach, and those of
    train.tasks.data. Their metrics are recorded as eval/TASK/METRIC."""
    data: list[str] = field(default_factory=list[str])
    "Folders with tasks of their own, YAML and data, as `prism evaluate --fetch-data FOLDER` writes them."
    limit_documents: int = 0
    "Documents scored of each task, its first ones; 0 is all."
    num_fewshot: int | None = None
    "Solved examples before each question, taken from a split that is not scored; null takes each task's own."

    def __post_init__(self) -> None:
        for name in ("every_steps", "limit_documents"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.tasks.{name}={getattr(self, name)} must be at least 0; use 0 to turn it off")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"train.tasks.num_fewshot={self.num_fewshot} must be at least 0; leave it out")
        repeated = [name for place, name in enumerate(self.names) if name in self.names[:place]]
        if repeated:
            raise ValueError(
                f"train.tasks.names=[{','.join(self.names)}] must hold each task once; name {repeated[0]} once only"
            )
        if self.every_steps and not self.names:
            raise ValueError(
                f"train.tasks.every_steps={self.every_steps} must go with tasks, and train.tasks.names=[] holds none; "
                "use train.tasks.names=[piqa,arc_easy] or train.tasks.every_steps=0"
            )


class TaskScorer(Protocol):
    """Scores tasks with a model."""

    def __call__(self, model: "nn.Module", /, *, look: Callable[[], None]) -> dict[str, float]:
        """Figures `eval/<task>/<metric>` of a model with its whole weights, the same on every rank. Each of them calls
        it.

        The model is not changed, nor put in another mode. Each rank calls `look` from time to time, between its own
        batches; what that raises there is raised on all ranks as RunFailed.
        """
        ...
