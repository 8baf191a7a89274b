"""All that a resume needs besides weights."""

import json
import random
from pathlib import Path

import numpy as np
import torch

from prism_lm.train.config import TrainConfig
from prism_lm.train.state import TrainState, capture_generators, restore_generators, seed_generators
from tests.harness import build_run


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(()).item(),
    ]


def test_generators_come_back_through_a_file(tmp_path: Path) -> None:
    seed_generators(5)
    draw()
    torch.save(capture_generators(), tmp_path / "rank_0.pt")
    expected = draw()
    restore_generators(torch.load(tmp_path / "rank_0.pt", weights_only=True))
    assert draw() == expected


def test_trainer_record_gives_the_state_back_through_json_to_the_bit(tmp_path: Path) -> None:
    state = TrainState(spike_window=[0.1 + 0.2, 1 / 3], validation_due=True)
    state.advance(tokens=100, applied=True, batch_hash=5)
    state.advance(tokens=100, applied=False, batch_hash=2**63 - 1)
    assert (state.step, state.tokens, state.skipped_steps, state.skipped_in_a_row) == (2, 200, 1, 1)
    record = json.loads(json.dumps(state.describe(build_run(tmp_path, TrainConfig()))))
    assert TrainState.from_trainer(record) == state
    assert record["world_size"] == 1 and record["fingerprint.model"] == "tiny"
    state.advance(tokens=100, applied=True, batch_hash=5)
    assert state.skipped_in_a_row == 0


def test_step_that_was_not_applied_moves_the_order_hash_all_the_same() -> None:
    applied, skipped = TrainState(), TrainState()
    applied.advance(tokens=1, applied=True, batch_hash=5)
    skipped.advance(tokens=1, applied=False, batch_hash=5)
    assert applied.order_hash == skipped.order_hash != ""
