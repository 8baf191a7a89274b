"""Saving, keeping and verifying, with one process."""

from pathlib import Path
from typing import Any

import pytest

from prism_lm.checkpoint import folder as disk
from prism_lm.checkpoint.manager import CheckpointConfig, CheckpointManager
from prism_lm.parallel.collectives import RunFailed
from prism_lm.parallel.mesh import Ranks, process_group
from tests.harness import read_ranks, run_on


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


def build_manager(run_dir: Path, *, ranks: Ranks | None = None, **settings: Any) -> CheckpointManager:
    return CheckpointManager(run_dir, CheckpointConfig(**settings), ranks or Ranks())


def save(manager: CheckpointManager, step: int, engine: FileEngine | None = None) -> None:
    manager.save(step, engine=engine or FileEngine(), trainer={"step": step}, rank_state={"loader": step})


def list_steps(run_dir: Path) -> list[int | None]:
    return [disk.read_step(folder) for folder in disk.list_published(run_dir)]


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
    with pytest.raises(RunFailed, match="no space"):
        save(manager, 2, engine)
    assert list_steps(tmp_path) == [1]
    build_manager(tmp_path).clean()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]


def test_damaged_file_is_named_on_resume(tmp_path: Path) -> None:
    save(build_manager(tmp_path), 3)
    folder = disk.step_folder(tmp_path, 3)
    build_manager(tmp_path).verify(folder)
    (folder / "deepspeed" / "shard.pt").write_bytes(b"sharp" * 50)
    with pytest.raises(RunFailed, match=r"step_3/deepspeed/shard\.pt must match its hash .*; restore it, or remove"):
        build_manager(tmp_path).verify(folder)


class RankEngine:
    """Writes one file a rank; the disk of `full_rank` is full at the phase named."""

    def __init__(self, rank: int, full_rank: int | None = None, phase: str = "") -> None:
        self.rank = rank
        self.full_phase = phase if rank == full_rank else ""

    def write(self, phase: str, path: Path) -> None:
        if phase == self.full_phase:
            raise OSError(f"no space left for {path.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100 + self.rank))

    def save(self, folder: Path) -> None:
        self.write("engine", folder / disk.ENGINE_NAME / f"shard_{self.rank}.pt")

    def save_weights(self, path: Path) -> None:
        if self.rank == 0:
            self.write("weights", path)


def save_with_old_views(run_dir: str) -> None:
    """Rank 0 does not see rank 1's files in its listing, and rank 1 not those of rank 0."""
    ranks = read_ranks()
    list_files = disk.list_files

    def list_own(folder: Path) -> list[str]:
        return [name for name in list_files(folder) if f"_{1 - ranks.rank}.pt" not in name]

    with process_group(ranks), pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "list_files", list_own)
        manager = build_manager(Path(run_dir), ranks=ranks)
        manager.save(2, engine=RankEngine(ranks.rank), trainer={"step": 2}, rank_state={"loader": 2})


def test_manifest_lists_the_files_of_ranks_that_no_single_rank_sees(tmp_path: Path) -> None:
    run_on(2, save_with_old_views, str(tmp_path))
    folder = disk.step_folder(tmp_path, 2)
    shards = ["deepspeed/shard_0.pt", "deepspeed/shard_1.pt", "ranks/rank_0.pt", "ranks/rank_1.pt"]
    assert sorted(disk.read_manifest(folder)) == sorted([*shards, "model.safetensors", "trainer.json"])
    assert disk.find_damaged(folder, shards) is None


FULL = [(1, "engine", "shard_1.pt"), (0, "engine", "shard_0.pt"), (0, "weights", "model.safetensors")]


def save_on_full_disks(run_dir: str) -> list[str]:
    """What this rank raised each time, and that the ranks are in step afterwards."""
    ranks, texts = read_ranks(), []
    with process_group(ranks):
        manager = build_manager(Path(run_dir), ranks=ranks)
        for step, (full_rank, phase, _) in enumerate(FULL, start=1):
            engine = RankEngine(ranks.rank, full_rank, phase)
            with pytest.raises(RunFailed) as caught:
                manager.save(step, engine=engine, trainer={"step": step}, rank_state={"loader": step})
            texts.append(str(caught.value))
        manager.save(9, engine=RankEngine(ranks.rank), trainer={"step": 9}, rank_state={"loader": 9})
    return texts


def test_full_disk_of_one_rank_ends_the_save_on_all_with_its_words(tmp_path: Path) -> None:
    first, second = run_on(2, save_on_full_disks, str(tmp_path), timeout_s=60)
    assert first == second == [f"no space left for {name} (rank {rank} of 2)" for rank, _, name in FULL]
    assert list_steps(tmp_path) == [9]


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
