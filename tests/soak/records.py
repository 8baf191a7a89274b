"""Whether two runs have the same records and the same last checkpoint, to the bit."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prism_lm.checkpoint import folder as disk
from tests.harness import read_records
from tests.soak.plan import KEEP_LAST, STEPS, Setting

MEASURED = ("speed/", "memory/")
"Figures that are measured and not computed."


def compare_runs(run_dir: Path, reference: Path, setting: Setting) -> None:
    """Fails naming the first difference."""
    compare_records(read_records(run_dir), read_records(reference))
    status = json.loads((run_dir / "result.json").read_text())["status"]
    assert status == "finished", f"result.json says {status}"
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    due = {f"step_{step}" for step in range(setting.save_every_steps, STEPS + 1, setting.save_every_steps)}
    newest = {f"step_{STEPS - number * setting.save_every_steps}" for number in range(KEEP_LAST)}
    assert newest <= names <= due, f"checkpoints/ holds {sorted(names)}, not {sorted(newest)}"
    compare_checkpoints(disk.step_folder(run_dir, STEPS), disk.step_folder(reference, STEPS))


def compare_records(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Each step of the expected ones once, in order, with equal figures."""
    steps = [record["step"] for record in actual]
    assert steps == [*range(1, len(expected) + 1)], f"metrics.jsonl holds the steps {steps}"
    for ours, theirs in zip(actual, expected, strict=True):
        for tag in sorted({*ours, *theirs}):
            if not tag.startswith(MEASURED):
                what = f"{tag} of step {ours['step']}"
                assert ours.get(tag) == theirs.get(tag), f"{what} is {ours.get(tag)!r}, not {theirs.get(tag)!r}"


def compare_checkpoints(folder: Path, reference: Path) -> None:
    """Weights and optimizer by their bytes, generators and places in the data by their values."""
    names = disk.list_files(reference)
    assert disk.list_files(folder) == names
    for name in names:
        ours, theirs = (read_content(path / name) for path in (folder, reference))
        assert ours == theirs, f"{folder / name} differs from {reference / name}"


def read_content(path: Path) -> Any:
    """A value that is equal where the file holds the same: trainer.json without its settings, which may differ."""
    if path.name == disk.TRAINER_NAME:
        return {name: value for name, value in json.loads(path.read_text()).items() if name != "train"}
    if path.suffix == ".pt":
        return freeze(torch.load(path, map_location="cpu", weights_only=False))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def freeze(value: Any) -> Any:
    """Nested values with tensors as their bytes; objects without a value of their own as their type."""
    match value:
        case dict():
            return {name: freeze(item) for name, item in value.items()}
        case list() | tuple():
            return [freeze(item) for item in value]
        case Tensor():
            kept = value.detach().contiguous().cpu()
            return str(kept.dtype), tuple(kept.shape), kept.reshape(-1).view(torch.uint8).numpy().tobytes()
        case np.ndarray():
            return str(value.dtype), value.shape, value.tobytes()
        case bool() | int() | float() | str() | bytes() | None:
            return value
        case _:
            return type(value).__name__
