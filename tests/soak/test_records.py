"""The comparison finds what a resume may get wrong."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.soak.death import find_place, remove_half, tear
from tests.soak.plan import STEPS
from tests.soak.records import compare_records, freeze

RECORDS: list[dict[str, Any]] = [
    {"step": step, "train/loss_nats": 4.0 / step, "data/order_hash": f"{step:x}", "speed/step_ms": 1.0}
    for step in range(1, STEPS + 1)
]


def test_equal_figures_pass_whatever_their_speed() -> None:
    actual = copy.deepcopy(RECORDS)
    actual[3]["speed/step_ms"] = 9.0
    compare_records(actual, RECORDS)


@pytest.mark.parametrize(
    ("tag", "value"), [("train/loss_nats", 4.0 / 5 * (1 + 2**-52)), ("data/order_hash", "0"), ("optim/new", 1.0)]
)
def test_one_figure_that_differs_by_a_bit_is_named_with_its_step(tag: str, value: Any) -> None:
    actual = copy.deepcopy(RECORDS)
    actual[4][tag] = value
    with pytest.raises(AssertionError, match=f"{tag} of step 5 is"):
        compare_records(actual, RECORDS)


def test_step_that_is_missing_or_recorded_twice_is_found() -> None:
    for actual in (RECORDS[:4] + RECORDS[3:], RECORDS[:4] + RECORDS[5:]):
        with pytest.raises(AssertionError, match=r"metrics\.jsonl holds the steps"):
            compare_records(actual, RECORDS)


def test_frozen_values_are_equal_for_equal_bits_alone() -> None:
    value = {"a": [torch.tensor([0.0, 1.0])], "b": (1, "x", None)}
    assert freeze(value) == freeze(copy.deepcopy(value))
    assert freeze(torch.tensor(0.0)) != freeze(torch.tensor(-0.0))
    assert freeze(torch.zeros(2)) != freeze(torch.zeros(2, dtype=torch.int32))


def test_moments_of_a_save_are_told_by_what_is_synced(tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    partial, folder = parent / ".partial_step_4", parent / "step_4"
    for path in (partial / "optimizer" / "rank_0.safetensors", folder / ".manifest.json.tmp", folder / "other"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(9))
    assert find_place(partial / "optimizer" / "rank_0.safetensors") == "file"
    assert find_place(partial) == "before_rename" and find_place(partial / "optimizer") is None
    assert find_place(parent) == "after_rename" and find_place(folder / ".manifest.json.tmp") == "manifest"
    assert find_place(folder) is None and find_place(folder / "other") is None
    (folder / ".manifest.json.tmp").rename(folder / "manifest.json")
    assert find_place(folder) == "published"


def test_torn_file_keeps_a_half_and_a_removed_half_leaves_files(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_bytes(bytes(10))
    tear(tmp_path / "a")
    assert (tmp_path / "a").stat().st_size == 5
    remove_half(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "d"]
