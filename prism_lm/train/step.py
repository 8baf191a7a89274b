"""One update and one validation pass, over whole global batches."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

import torch

from prism_lm.model.lm import IGNORED_LABEL
from prism_lm.parallel.collectives import gather_objects, sum_tensor
from prism_lm.train.engine import Engine
from prism_lm.train.stopwatch import FORWARD, LOSS_SUM


class TrainBatch(TypedDict):
    """What a step needs of a micro-batch; B rows of T tokens."""

    input_ids_BT: torch.Tensor
    "int64"
    labels_BT: torch.Tensor
    "int64, -100 where no loss is taken"
    document_start_BT: torch.Tensor
    "bool, True at the first token of a document"
    row_hash_B: torch.Tensor
    "int64, 0 or more: a hash of each whole row, equal on all processes that hold a slice of it"
    source_B: torch.Tensor
    "int64: which of the split's sources, sorted by name, each row is of; -1 for rows without labels"


MODEL_INPUTS = ("input_ids_BT", "labels_BT", "document_start_BT")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One update, the same on every rank."""

    applied: bool
    "Whether the update was made; it is not when loss or gradients are not finite, or the loss is above its limit."
    loss_nats: torch.Tensor
    "Mean over the global batch's valid tokens, fp64 scalar on the device; reading it waits for the device."
    grad_norm: float
    learning_rate: float
    problem: str = ""
    "Why the update was not made: what was not finite and on which ranks, or which limit was passed; else empty."


def count_valid_tokens(batches: Iterable[TrainBatch]) -> int:
    """Labels that carry loss, in this rank's micro-batches."""
    return sum(int((batch["labels_BT"] != IGNORED_LABEL).sum()) for batch in batches)


def train_step(
    engine: Engine,
    batches: Sequence[TrainBatch],
    *,
    valid_tokens: int,
    world_size: int,
    learning_rate: float,
    max_loss_nats: float = math.inf,
    should_stop: Callable[[], bool] = lambda: False,
) -> StepResult | None:
    """Forward and backward over this rank's micro-batches, then one update from the global mean gradient, which is not
    made where the global mean loss is above max_loss_nats.

    valid_tokens counts the whole global batch. DeepSpeed averages over ranks, so each loss sum is scaled by
    world_size / valid_tokens to make that average the gradient of the global mean.

    should_stop is asked between micro-batches, and must say the same on every rank; where it says so the result is
    None, nothing was applied, and the engine can be saved but holds gradients that nobody will use.
    """
    scale = world_size / max(1, valid_tokens)
    local_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
    loss_nats = local_sum
    for index, batch in enumerate(batches):
        if index > 0 and should_stop():
            return None
        is_last = index == len(batches) - 1
        with engine.stopwatch.measuring(FORWARD):
            loss_sum = engine.compute_loss(move_to_device(batch, engine.device), is_last=is_last)
        local_sum = local_sum + loss_sum.detach()
        factor: torch.Tensor | float = 1.0
        if is_last:
            with engine.stopwatch.measuring(LOSS_SUM):
                loss_nats = sum_tensor(local_sum) / max(1, valid_tokens)
            factor = _spoil_unless_within(loss_nats, max_loss_nats)
        engine.backward(loss_sum * scale * factor)
    outcome = engine.step(learning_rate)
    return StepResult(
        applied=outcome.applied,
        loss_nats=loss_nats,
        grad_norm=outcome.grad_norm,
        learning_rate=learning_rate,
        problem="" if outcome.applied else _describe_problem(local_sum, float(loss_nats), max_loss_nats),
    )


def _spoil_unless_within(loss_nats: torch.Tensor, max_loss_nats: float) -> torch.Tensor:
    """A factor of 1, or NaN where the loss is not finite or above the limit.

    It carries that into the gradients, which can stay finite under an infinite loss: the gradient norm that all ranks
    share then decides alone, and the host does not wait for the loss.
    """
    is_within = torch.isfinite(loss_nats) & (loss_nats <= max_loss_nats)
    return torch.where(is_within, 1.0, math.nan).to(torch.float32)


def _describe_problem(local_sum: torch.Tensor, loss_nats: float, max_loss_nats: float) -> str:
    finite = gather_objects(math.isfinite(float(local_sum)))
    ranks = [str(rank) for rank, is_finite in enumerate(finite) if not is_finite]
    if ranks:
        return f"the loss of rank {', '.join(ranks)} is not finite"
    if loss_nats > max_loss_nats:
        return f"the loss of {loss_nats:.4f} nats is above the spike threshold of {max_loss_nats:.4f} nats"
    return "the gradient norm is not finite, though every rank's loss is"


def compute_validation_losses(
    engine: Engine, batches: Iterable[TrainBatch | None], *, num_sources: int = 1
) -> list[float | None] | None:
    """Mean nats over the valid tokens of all ranks' micro-batches, over all of them and then, where there are several
    sources, over those of each; None of a mean over no token. Each rank must pass equally many micro-batches.

    A None among them, at the same place on every rank, ends the pass without a result.
    """
    sums_S2 = torch.zeros(num_sources, 2, dtype=torch.float64, device=engine.device)
    for batch in batches:
        if batch is None:
            return None
        sums_S2 += _sum_each_source(engine, batch, num_sources) if num_sources > 1 else _sum_all(engine, batch)
    sums_S2 = sum_tensor(sums_S2).cpu()
    rows = [sums_S2.sum(0), *sums_S2] if num_sources > 1 else [*sums_S2]
    return [float(nats / tokens) if tokens else None for nats, tokens in rows]


def _sum_all(engine: Engine, batch: TrainBatch) -> torch.Tensor:
    """Nats and valid tokens of a micro-batch, (1, 2)."""
    nats = engine.evaluate_loss(move_to_device(batch, engine.device)).double()
    return torch.stack([nats, torch.full_like(nats, count_valid_tokens([batch]))])[None]


def _sum_each_source(engine: Engine, batch: TrainBatch, num_sources: int) -> torch.Tensor:
    """The same of each source's rows, (num_sources, 2). A product, since a GPU adds scattered values in any order."""
    nats_B = engine.evaluate_token_losses(move_to_device(batch, engine.device)).double().sum(dim=1)
    tokens_B = (batch["labels_BT"] != IGNORED_LABEL).sum(dim=1)
    is_of_SB = batch["source_B"] == torch.arange(num_sources)[:, None]
    columns_B2 = torch.stack([nats_B, tokens_B.to(nats_B)], dim=1)
    return is_of_SB.to(columns_B2) @ columns_B2


def move_to_device(batch: TrainBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """What the model takes of the micro-batch, on the device; the host does not wait for what the device was given to
    do before."""
    tensors = cast(dict[str, torch.Tensor], batch)
    return {name: tensors[name].to(device, non_blocking=True) for name in MODEL_INPUTS}
