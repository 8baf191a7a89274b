"""Saving, keeping and verifying, with one process."""

from pathlib import Path
from typing import Any

import pytest

from prism_lm.checkpoint import folder as disk
from prism_lm.checkpoint.manager import CheckpointConfig, CheckpointManager
from prism_lm.parallel.collectives import RunFailed
from prism_lm.parallel.mesh import Ranks


class FileEngine:
    """Writes a file where the engine would write its state; `broken` stops half way."""

    broken = False

    def save(self, folder: Path) -> None:
        (folder / disk.ENGINE_NAME).mkdir()
        (folder / disk.ENGINE_NAME / "shard.pt").write_bytes(b"shard" * 50)

    def save_weights(self, path: Path) -> None:
        if self.broken:
            raise OSError("no space left on device")
        path.write_bytes(b"weights")


def build_manager(run_dir: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(run_dir, CheckpointConfig(**settings), Ranks())


def save(manager: CheckpointManager, step: int, engine: FileEngine | None = None) -> None:
    manager.save(step, engine=engine or FileEngine(), trainer={"step": step}, rank_state={"loader": step})


def list_steps(run_dir: Path) -> list[int | None]:
    return [disk.read_step(folder) for folder in disk.list_complete(run_dir)]


def test_checkpoint_holds_engine_weights_ranks_and_trainer(tmp_path: Path) -> None:
    save(build_manager(tmp_path), 6)
    assert disk.list_files(disk.step_folder(tmp_path, 6)) == [
        "deepspeed/shard.pt",
        "model.safetensors",
        "ranks/rank_0.pt",
        "trainer.json",
    ]


def test_only_the_last_and_the_kept_multiples_stay(tmp_path: Path) -> None:
    manager = build_manager(tmp_path, keep_last=2, keep_every_steps=4)
    for step in range(1, 8):
        save(manager, step)
    assert list_steps(tmp_path) == [4, 6, 7]


def test_failed_save_leaves_the_former_checkpoint_and_is_cleaned(tmp_path: Path) -> None:
    manager = build_manager(tmp_path, keep_last=1)
    save(manager, 1)
    engine = FileEngine()
    engine.broken = True
    with pytest.raises(OSError, match="no space"):
        save(manager, 2, engine)
    assert list_steps(tmp_path) == [1]
    build_manager(tmp_path).clean()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]


def test_damaged_file_is_named_on_resume(tmp_path: Path) -> None:
    save(build_manager(tmp_path), 3)
    folder = disk.step_folder(tmp_path, 3)
    build_manager(tmp_path).verify(folder)
    (folder / "deepspeed" / "shard.pt").write_bytes(b"sharp" * 50)
    with pytest.raises(RunFailed, match=r"step_3/deepspeed/shard\.pt must match its hash .* remove the folder"):
        build_manager(tmp_path).verify(folder)


def test_saves_are_due_at_multiples_or_never() -> None:
    manager = build_manager(Path(), save_every_steps=5)
    assert [step for step in range(1, 12) if manager.is_due(step)] == [5, 10]
    assert not any(build_manager(Path(), save_every_steps=0).is_due(step) for step in range(1, 12))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"keep_last": 0}, r"train\.checkpoint\.keep_last=0 must be at least 1; use 1"),
        ({"save_every_steps": -1}, r"train\.checkpoint\.save_every_steps=-1 must be at least 0; use 0"),
        ({"keep_every_steps": -1}, r"train\.checkpoint\.keep_every_steps=-1 must be at least 0; use 0"),
    ],
)
def test_settings_out_of_range_are_refused_with_the_remedy(settings: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CheckpointConfig(**settings)
