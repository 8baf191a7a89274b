import math

import pytest
import torch
from torch import Tensor, nn

from prism_lm.eval.probes.cell import ProbeDiverged, score_rows, train_cell
from prism_lm.eval.probes.config import ProbeConfig
from prism_lm.eval.probes.models import configure_model
from prism_lm.eval.probes.rows import IGNORED, draw_rows
from prism_lm.eval.probes.tasks import TASKS
from prism_lm.model.lm import build_model

SHORT = ProbeConfig(steps=60, batch_rows=8, heldout_rows=64)


class Memoryless(nn.Module):
    """The same model with every token a document of its own: nothing is carried over any distance."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids_BT: Tensor, _: None, labels_BT: Tensor | None) -> Tensor:
        return self.model(input_ids_BT, torch.ones_like(input_ids_BT, dtype=torch.bool), labels_BT)


class Oracle(nn.Module):
    """Answers local XOR without learning: the two tokens before."""

    def forward(self, input_ids_BT: Tensor, _: None, labels_BT: Tensor | None) -> Tensor:
        assert labels_BT is None
        return nn.functional.one_hot(input_ids_BT.roll(1, 1) ^ input_ids_BT.roll(2, 1), 64).float()


def test_prism_learns_local_xor_and_without_memory_it_stays_at_the_floor() -> None:
    task = TASKS["local_xor"]
    learned = train_cell(build_model(configure_model("prism_l1"), seed=0), task, SHORT, seed=0)
    memoryless = train_cell(Memoryless(build_model(configure_model("prism_l1"), seed=0)), task, SHORT, seed=0)
    assert learned.accuracy > 0.98 and learned.scored == 64 * 24
    assert abs(memoryless.accuracy - task.floor) < 5 * math.sqrt(0.25 / memoryless.scored)
    assert memoryless.heldout_loss_nats > 0.9 * math.log(2) > learned.heldout_loss_nats


def test_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    config = ProbeConfig(steps=3, batch_rows=4, heldout_rows=8)
    losses = [
        train_cell(build_model(configure_model("gated_delta"), seed=0), TASKS["mux"], config, seed=seed).curve
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2] and list(losses[0]) == [1, 2, 3]


def test_scoring_counts_scored_positions_only_and_all_of_them() -> None:
    rows = draw_rows(TASKS["local_xor"], num_rows=10, seed=[0], split="heldout")
    right, _, scored = score_rows(Oracle(), rows, batch_rows=4)
    assert right == scored == int((rows.labels_RT != IGNORED).sum()) == 240


def test_lost_loss_stops_a_cell_by_name() -> None:
    model = build_model(configure_model("prism_l0"), seed=0)
    with torch.no_grad():
        model.head.weight.fill_(math.nan)
    with pytest.raises(ProbeDiverged, match="task=parity seed=7 must keep a finite loss; it is lost by step 1"):
        train_cell(model, TASKS["parity"], ProbeConfig(steps=2, batch_rows=2, heldout_rows=8), seed=7)


def test_rate_rises_to_its_peak_and_falls_to_a_twentieth() -> None:
    config = ProbeConfig(steps=100)
    scales = [config.scale_rate(step) for step in range(1, 101)]
    assert scales[:10] == sorted(scales[:10]) and scales[9] == 1.0
    assert scales[9:] == sorted(scales[9:], reverse=True) and scales[-1] == pytest.approx(0.05)
