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
from prism_lm.eval.probes.rows import IGNORED, ROW_TOKENS, Rows, Task, draw_rows

CURVE_POINTS = 20
STEPS_BEFORE_CAPTURE = 3
"Steps on a GPU that are launched kernel by kernel, so that the captured one finds everything compiled and tuned."


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
    trainer = Trainer(model, config, device=device)
    curve: dict[int, float] = {}
    every = max(1, config.steps // CURVE_POINTS)
    for step in range(1, config.steps + 1):
        trainer.take_step(draw_rows(task, num_rows=config.batch_rows, seed=[seed, step], split="train"), step)
        if step % every == 0 or step == config.steps:
            curve[step] = trainer.take_mean_loss()
            if not math.isfinite(curve[step]):
                raise ProbeDiverged(f"task={task.name} seed={seed} must keep a finite loss; it is lost by step {step}")
        if on_step is not None:
            on_step(step)
    return curve


class Trainer:
    """Steps of AdamW on batches of one shape. Every tensor that a step reads lies where it lay before, so that on a
    GPU, where a step of a model this small is hundreds of launches, it is captured as a CUDA graph and replayed."""

    def __init__(self, model: nn.Module, config: ProbeConfig, *, device: "torch.device | str") -> None:
        self._model, self._config = model, config
        self._device = torch.device(device)
        shape = (config.batch_rows, ROW_TOKENS)
        self._tokens_BT, self._labels_BT = torch.zeros((2, *shape), dtype=torch.int64, device=device).unbind()
        self._scored, self._rate, self._loss_sum = torch.zeros(3, device=device).unbind()
        self._optimizer = build_optimizer(model, config, rate=self._rate)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps_summed = 0

    def take_step(self, rows: Rows, step: int) -> None:
        """Learn from config.batch_rows rows at the rate of a step, counted from 1."""
        self._tokens_BT.copy_(torch.from_numpy(rows.tokens_RT))
        self._labels_BT.copy_(torch.from_numpy(rows.labels_RT))
        self._scored.fill_(int((rows.labels_RT != IGNORED).sum()))
        self._rate.fill_(self._config.learning_rate * self._config.scale_rate(step))
        self._steps_summed += 1
        if self._device.type != "cuda":
            self._compute()
        elif step <= STEPS_BEFORE_CAPTURE:
            self._compute_aside()
        else:
            self._graph = self._graph or self._capture()
            self._graph.replay()

    def take_mean_loss(self) -> float:
        """Mean loss in nats of the steps since it was last taken."""
        mean = float(self._loss_sum) / self._steps_summed
        self._loss_sum.zero_()
        self._steps_summed = 0
        return mean

    def _compute(self) -> None:
        self._optimizer.zero_grad()
        loss: Tensor = self._model(self._tokens_BT, None, self._labels_BT) / self._scored
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._config.clip_norm)
        self._optimizer.step()
        self._loss_sum += loss.detach()

    def _compute_aside(self) -> None:
        """On a stream of its own, as a capture asks of the steps before it: they compile, tune and allocate."""
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            self._compute()
        torch.cuda.current_stream(self._device).wait_stream(aside)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._optimizer.zero_grad()
        with torch.cuda.graph(graph):
            self._compute()
        return graph


def build_optimizer(model: nn.Module, config: ProbeConfig, *, rate: Tensor) -> torch.optim.AdamW:
    """AdamW at the rate that `rate` holds; matrices decay, vectors and the embedding do not."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in model.parameters():
        groups[parameter.ndim < 2 or id(parameter) in tables].append(parameter)
    decays = (config.weight_decay, 0.0)
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, decays, strict=True)],
        lr=rate,
        betas=(0.9, 0.95),
        fused=True,
        capturable=rate.is_cuda,
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
