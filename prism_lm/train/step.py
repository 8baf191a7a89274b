"""One update and one validation pass, over whole global batches."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

import torch

from prism_lm.model.lm import IGNORED_LABEL
from prism_lm.parallel.collectives import gather_objects, sum_tensor
from prism_lm.train.engine import Engine


class TrainBatch(TypedDict):
    """What a step needs of a micro-batch; B rows of T tokens."""

    input_ids_BT: torch.Tensor
    "int64"
    labels_BT: torch.Tensor
    "int64, -100 where no loss is taken"
    document_start_BT: torch.Tensor
    "bool, True at the first token of a document"


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One update, the same on every rank."""

    applied: bool
    "Whether the update was made; it is not when loss or gradients are not finite."
    loss_nats: torch.Tensor
    "Mean over the global batch's valid tokens, fp64 scalar on the device; reading it waits for the device."
    grad_norm: float
    learning_rate: float
    problem: str = ""
    "What was not finite, and on which ranks; empty when applied."


def count_valid_tokens(batches: Iterable[TrainBatch]) -> int:
    """Labels that carry loss, in this rank's micro-batches."""
    return sum(int((batch["labels_BT"] != IGNORED_LABEL).sum()) for batch in batches)


def train_step(
    engine: Engine, batches: Sequence[TrainBatch], *, valid_tokens: int, world_size: int, learning_rate: float
) -> StepResult:
    """Forward and backward over this rank's micro-batches, then one update from the global mean gradient.

    valid_tokens counts the whole global batch. DeepSpeed averages over ranks, so each loss sum is scaled by
    world_size / valid_tokens to make that average the gradient of the global mean.
    """
    scale = world_size / max(1, valid_tokens)
    local_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        loss_sum = engine.compute_loss(move_to_device(batch, engine.device), is_last=is_last)
        local_sum = local_sum + loss_sum.detach()
        engine.backward(loss_sum * scale * _spoil_if_nonfinite(local_sum, is_last=is_last))
    outcome = engine.step(learning_rate)
    return StepResult(
        applied=outcome.applied,
        loss_nats=sum_tensor(local_sum) / max(1, valid_tokens),
        grad_norm=outcome.grad_norm,
        learning_rate=learning_rate,
        problem="" if outcome.applied else _describe_problem(local_sum),
    )


def _spoil_if_nonfinite(local_sum: torch.Tensor, *, is_last: bool) -> torch.Tensor | float:
    """A factor that carries a non-finite loss into the gradients, which can stay finite under an infinite loss.

    The gradient norm that all ranks share then decides alone, and no rank waits for its own loss to be read.
    """
    if not is_last:
        return 1.0
    return torch.where(torch.isfinite(local_sum), 1.0, math.nan).to(torch.float32)


def _describe_problem(local_sum: torch.Tensor) -> str:
    finite = gather_objects(math.isfinite(float(local_sum)))
    ranks = [str(rank) for rank, is_finite in enumerate(finite) if not is_finite]
    if ranks:
        return f"the loss of rank {', '.join(ranks)}"
    return "the gradient norm (every rank's loss was finite)"


def compute_validation_loss(engine: Engine, batches: Iterable[TrainBatch]) -> float:
    """Mean nats over the valid tokens of all ranks' micro-batches; each rank must pass equally many."""
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for batch in batches:
        sums[0] += engine.evaluate_loss(move_to_device(batch, engine.device)).double()
        sums[1] += count_valid_tokens([batch])
    nats, tokens = sum_tensor(sums).tolist()
    return nats / tokens if tokens else math.nan


def move_to_device(batch: TrainBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """The micro-batch on the device; the host does not wait for what the device was given to do before."""
    tensors = cast(dict[str, torch.Tensor], batch)
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
