"""Run folders written by hand, as a run leaves them, without training."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prism_lm.checkpoint.folder import describe_file
from prism_lm.parallel.process_identity import identify_process

CONFIG = "run_dir: somewhere\ntrain:\n  steps: 1000\n  checkpoint:\n    keep_last: 2\n    keep_every_steps: 100\n"
RECORD = {"tokens": 4000, "train/loss_nats": 3.25, "speed/tokens_per_s": 512.0, "speed/eta_s": 300.0}


def write_checkpoint(run_dir: Path, step: int) -> Path:
    """A complete checkpoint of a few small files, as two processes at ZeRO stage 1 would write it."""
    folder = run_dir / "checkpoints" / f"step_{step}"
    (folder / "ranks").mkdir(parents=True)
    arrangement = {"world_size": 2, "parallel.sequence_degree": 2, "train.zero_stage": 1}
    trainer = {"step": step, "tokens": 100 * step, **arrangement}
    (folder / "trainer.json").write_text(json.dumps(trainer))
    (folder / "model.safetensors").write_bytes(bytes(2048))
    (folder / "ranks" / "rank_0.pt").write_bytes(b"generators")
    names = ("trainer.json", "model.safetensors", "ranks/rank_0.pt")
    (folder / "manifest.json").write_text(json.dumps({"files": {name: describe_file(folder / name) for name in names}}))
    return folder


def flip_byte(path: Path) -> None:
    """Another byte in the middle, the size as it was."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def write_lines(path: Path, *values: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def write_owner(run_dir: Path, *, silent_s: float = 0.0, **changes: Any) -> None:
    """owner.json of this very process, with its last heartbeat silent_s ago, unless changed."""
    held = {"token": "0" * 32, **asdict(identify_process()), "started": "2026-12-01T10:00:00+0000"}
    path = run_dir / "owner.json"
    path.write_text(json.dumps(held | changes))
    beat_s = time.time() - silent_s
    os.utime(path, (beat_s, beat_s))
