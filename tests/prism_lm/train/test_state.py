"""All that a resume needs besides weights."""

import random
from pathlib import Path

import numpy as np
import torch

from prism_lm.checkpoint.folder import rank_file
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.config import TrainConfig
from prism_lm.train.state import TrainState, capture_rank_state, restore_rank_state, seed_generators
from tests.harness import ListLoader, build_run


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(()).item(),
    ]


def build_loader() -> ListLoader:
    return ListLoader(Ranks(), global_rows=2, micro_rows=1)


def test_generators_and_place_in_the_data_come_back(tmp_path: Path) -> None:
    seed_generators(5)
    draw()
    loader = build_loader()
    iterator = iter(loader)
    next(iterator)
    (tmp_path / "ranks").mkdir()
    torch.save(capture_rank_state(loader), rank_file(tmp_path, 0))
    expected, following = draw(), next(iterator)
    restored = build_loader()
    restore_rank_state(tmp_path, 0, restored)
    assert draw() == expected
    assert torch.equal(next(iter(restored))["input_ids_BT"], following["input_ids_BT"])


def test_trainer_record_gives_the_state_back(tmp_path: Path) -> None:
    state = TrainState()
    state.advance(tokens=100, applied=True)
    state.advance(tokens=100, applied=False)
    assert (state.step, state.tokens, state.skipped_steps, state.nonfinite_in_a_row) == (2, 200, 1, 1)
    record = state.describe(build_run(tmp_path, TrainConfig()))
    assert TrainState.from_trainer(record) == state
    assert record["world_size"] == 1 and record["fingerprint.model"] == "tiny"
    state.advance(tokens=100, applied=True)
    assert state.nonfinite_in_a_row == 0
