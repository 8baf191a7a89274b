"""Probes on a GPU, where a training step is captured and replayed."""

import itertools

import pytest
import torch

from prism_lm.eval.probes import cell
from prism_lm.eval.probes.config import ProbeConfig
from prism_lm.eval.probes.models import configure_model
from prism_lm.eval.probes.tasks import TASKS
from prism_lm.model.kernels import select_operators
from prism_lm.model.lm import build_model

pytestmark = pytest.mark.gpu
CONFIG = ProbeConfig(steps=40, batch_rows=8, heldout_rows=64)
TOLERANCE = 1e-3
"Relative, of a mean loss after up to 40 steps of fp32 whose sums may be taken in another order."


@pytest.mark.parametrize("name", ["prism_l0", "prism_l2", "linear_attention", "gated_delta", "attention"])
def test_captured_steps_learn_what_launched_ones_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> cell.CellResult:
        model = build_model(configure_model(name), seed=0, device="cuda", operators=select_operators("cuda"))
        return cell.train_cell(model, TASKS["local_xor"], CONFIG, seed=0, device="cuda")

    captured = train()
    monkeypatch.setattr(cell, "STEPS_BEFORE_CAPTURE", CONFIG.steps)
    launched = train()
    assert captured.curve == pytest.approx(launched.curve, rel=TOLERANCE)
    assert captured.heldout_loss_nats == pytest.approx(launched.heldout_loss_nats, rel=TOLERANCE)
    print(f"{name}: {captured.wall_s:.2f} s captured, {launched.wall_s:.2f} s launched")


def test_rate_follows_its_schedule_through_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rate of 0 after the warm-up steps no weight moves: what is replayed reads the rate anew."""
    monkeypatch.setattr(ProbeConfig, "scale_rate", lambda _, step: float(step <= cell.STEPS_BEFORE_CAPTURE + 2))
    model = build_model(configure_model("prism_l1"), seed=0, device="cuda", operators=select_operators("cuda"))
    trainer = cell.Trainer(model, CONFIG, device="cuda")
    weights = []
    for step in range(1, 9):
        rows = cell.draw_rows(TASKS["parity"], num_rows=CONFIG.batch_rows, seed=[0, step], split="train")
        trainer.take_step(rows, step)
        weights.append(model.head.weight.detach().clone())
    moves = [not torch.equal(before, after) for before, after in itertools.pairwise(weights)]
    assert moves == [True] * 4 + [False] * 3
