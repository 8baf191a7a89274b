"""Train one small model on one task and score it on held-out rows. One process, plain AdamW, no run folder.

Dims: B rows of a batch, T tokens, V vocabulary.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from prism_lm.eval.probes.config import ProbeConfig
from prism_lm.eval.probes.rows import IGNORED, Rows, Task, draw_rows

CURVE_POINTS = 20


class ProbeDiverged(RuntimeError):
    """A loss that is no number."""


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What one model learned of one task with one seed."""

    accuracy: float
    "Share of scored positions of held-out rows with the right answer, 0 to 1."
    heldout_loss_nats: float
    scored: int
    "Scored positions of the held-out rows."
    wall_s: float
    curve: dict[int, float] = field(default_factory=dict[int, float])
    "Mean training loss in nats over the steps up to each step."


def train_cell(
    model: nn.Module,
    task: Task,
    config: ProbeConfig,
    *,
    seed: int,
    device: "torch.device | str" = "cpu",
    on_step: Callable[[int], None] | None = None,
) -> CellResult:
    """Train `model` (input_ids_BT, None, labels_BT -> summed nats; without labels logits BTV) for config.steps steps of
    fresh rows, then score it. Rows depend on task, seed and step alone. Raises ProbeDiverged."""
    started = time.perf_counter()
    curve = _train(model.train(), task, config, seed=seed, device=device, on_step=on_step)
    heldout = draw_rows(task, num_rows=config.heldout_rows, seed=[seed], split="heldout")
    right, nats, scored = score_rows(model.eval(), heldout, batch_rows=4 * config.batch_rows, device=device)
    return CellResult(
        accuracy=right / scored,
        heldout_loss_nats=nats / scored,
        scored=scored,
        wall_s=time.perf_counter() - started,
        curve=curve,
    )


def _train(
    model: nn.Module,
    task: Task,
    config: ProbeConfig,
    *,
    seed: int,
    device: "torch.device | str",
    on_step: Callable[[int], None] | None,
) -> dict[int, float]:
    optimizer = build_optimizer(model, config)
    curve: dict[int, float] = {}
    window: list[Tensor] = []
    every = max(1, config.steps // CURVE_POINTS)
    for step in range(1, config.steps + 1):
        rows = draw_rows(task, num_rows=config.batch_rows, seed=[seed, step], split="train")
        window.append(_take_step(model, optimizer, rows, config, step=step, device=device))
        if step % every == 0 or step == config.steps:
            curve[step] = float(torch.stack(window).mean())
            window.clear()
            if not math.isfinite(curve[step]):
                raise ProbeDiverged(f"task={task.name} seed={seed} must keep a finite loss; it is lost by step {step}")
        if on_step is not None:
            on_step(step)
    return curve


def _take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Rows,
    config: ProbeConfig,
    *,
    step: int,
    device: "torch.device | str",
) -> Tensor:
    """One step of AdamW; returns the mean loss in nats, detached and still on its device."""
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * config.scale_rate(step)
    tokens_BT, labels_BT = (torch.from_numpy(part).to(device) for part in (rows.tokens_RT, rows.labels_RT))
    scored = int((rows.labels_RT != IGNORED).sum())
    loss: Tensor = model(tokens_BT, None, labels_BT) / scored
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    optimizer.step()
    return loss.detach()


def build_optimizer(model: nn.Module, config: ProbeConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors and the embedding do not."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in model.parameters():
        groups[parameter.ndim < 2 or id(parameter) in tables].append(parameter)
    decays = (config.weight_decay, 0.0)
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, decays, strict=True)],
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )


@torch.no_grad()
def score_rows(
    model: nn.Module, rows: Rows, *, batch_rows: int, device: "torch.device | str" = "cpu"
) -> tuple[int, float, int]:
    """Right answers, nats and number of scored positions."""
    right = scored = 0
    nats = 0.0
    for first in range(0, len(rows), batch_rows):
        part = slice(first, first + batch_rows)
        tokens_BT, labels_BT = (torch.from_numpy(x[part]).to(device) for x in (rows.tokens_RT, rows.labels_RT))
        logits_BTV = model(tokens_BT, None, None)
        asked_BT = labels_BT != IGNORED
        right += int((logits_BTV.argmax(-1) == labels_BT)[asked_BT].sum())
        nats += float(nn.functional.cross_entropy(logits_BTV[asked_BT], labels_BT[asked_BT], reduction="sum"))
        scored += int(asked_BT.sum())
    return right, nats, scored
