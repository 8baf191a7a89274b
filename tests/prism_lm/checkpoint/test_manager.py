"""Saving, keeping and verifying, with one process."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from prism_lm.checkpoint import folder as disk
from prism_lm.checkpoint.fragments import KINDS, Piece
from prism_lm.checkpoint.manager import CheckpointConfig, CheckpointManager
from prism_lm.checkpoint.share import Staged
from prism_lm.parallel.collectives import RunFailed, sum_integers
from prism_lm.parallel.mesh import Ranks, process_group
from tests.harness import read_ranks, run_on


class TinyEngine:
    """Holds one parameter of eight elements, of which every rank has its share."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()

    def stage(self) -> Staged:
        begin, end = (8 * rank // self.ranks.world_size for rank in (self.ranks.rank, self.ranks.rank + 1))
        values = torch.arange(begin, end, dtype=torch.float32)
        return Staged(
            optimizer={f"{kind}/w": values + index for index, kind in enumerate(KINDS)},
            pieces=[Piece(name="w", start=begin, numel=end - begin)],
            shapes={"w": (2, 4)},
            applied_steps=3,
            weights={"w": torch.arange(8.0).view(2, 4)} if self.ranks.is_main else {},
        )


class FullDisk:
    """Stands for a file's writer on a full disk."""

    def __call__(self, tensors: object, path: Path) -> None:
        raise OSError(f"no space left for {path.name}")


def build_manager(run_dir: Path, *, ranks: Ranks | None = None, **settings: Any) -> CheckpointManager:
    return CheckpointManager(run_dir, CheckpointConfig(**settings), ranks or Ranks())


def save(manager: CheckpointManager, step: int, *, ranks: Ranks | None = None, wait: bool = True) -> None:
    states: dict[str, Any] = {"trainer": {"step": step}, "rank_state": {"seed": step}, "probe": {}}
    manager.save(step, engine=TinyEngine(ranks), wait=wait, **states)


def list_steps(run_dir: Path) -> list[int | None]:
    return [disk.read_step(folder) for folder in disk.list_published(run_dir)]


FILES = ["model.safetensors", "optimizer/index.json", "optimizer/rank_0.safetensors", "ranks/rank_0.pt", "trainer.json"]


def test_checkpoint_holds_weights_optimizer_ranks_and_trainer(tmp_path: Path) -> None:
    save(build_manager(tmp_path), 6)
    folder = disk.step_folder(tmp_path, 6)
    assert disk.list_files(folder) == sorted(disk.read_manifest(folder)) == FILES


def test_only_the_last_and_the_kept_multiples_stay(tmp_path: Path) -> None:
    manager = build_manager(tmp_path, keep_last=2, keep_every_steps=4)
    for step in range(1, 8):
        save(manager, step)
    assert list_steps(tmp_path) == [4, 6, 7]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_failed_save_leaves_the_former_checkpoint_and_is_cleaned(asynchronous: bool, tmp_path: Path) -> None:
    manager = build_manager(tmp_path, keep_last=1, asynchronous=asynchronous)
    save(manager, 1)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RunFailed, match=r"no space left for rank_0\.safetensors"),
    ):
        patch.setattr(safetensors.torch, "save_file", FullDisk())
        save(manager, 2)
    assert list_steps(tmp_path) == [1] and not manager.has_saved(2)
    build_manager(tmp_path).clean()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]


def test_damaged_file_is_named_on_resume(tmp_path: Path) -> None:
    save(build_manager(tmp_path), 3)
    folder = disk.step_folder(tmp_path, 3)
    build_manager(tmp_path).verify(folder)
    path = folder / "optimizer" / "rank_0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunFailed, match=r"step_3/optimizer/rank_0\.safetensors must match its hash .*; restore it, or"):
        build_manager(tmp_path).verify(folder)


def test_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = build_manager(tmp_path)
    save(manager, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        RunFailed, match=r"must have 0\.01 GiB free for the checkpoint of step_2, but has 0\.00; remove"
    ):
        save(manager, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]


def test_run_that_was_taken_over_publishes_and_removes_nothing(tmp_path: Path) -> None:
    save(build_manager(tmp_path), 1)

    def refuse() -> None:
        raise RunFailed("another start took this run over")

    late = CheckpointManager(tmp_path, CheckpointConfig(keep_last=1), Ranks(), check_owner=refuse)
    with pytest.raises(RunFailed, match="took this run over"):
        save(late, 2)
    assert list_steps(tmp_path) == [1]


def save_while_training(run_dir: str) -> list[tuple[list[int | None], bool]]:
    """Published steps and whether a save is under way: after the save began, after it was agreed on, after the next."""
    ranks, seen, may_write = read_ranks(), list[tuple[list[int | None], bool]](), threading.Event()
    describe_file = disk.describe_file

    def describe_later(path: Path) -> disk.FileEntry:
        assert may_write.wait(30)
        return describe_file(path)

    with process_group(ranks), pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "describe_file", describe_later)
        manager = build_manager(Path(run_dir), ranks=ranks, asynchronous=True)
        save(manager, 1, ranks=ranks, wait=False)
        manager.note_agreed(*sum_integers(manager.describe_progress()))
        seen.append((list_steps(Path(run_dir)), manager.is_writing))
        may_write.set()
        save(manager, 2, ranks=ranks, wait=False)
        seen.append((list_steps(Path(run_dir))[:1], manager.has_saved(2)))
        manager.finish()
        sum_integers([0])
        seen.append((list_steps(Path(run_dir)), manager.is_writing))
    return seen


def test_asynchronous_save_is_published_once_all_ranks_have_written_and_before_the_next(tmp_path: Path) -> None:
    expected = [([], True), ([1], True), ([1, 2], False)]
    assert run_on(2, save_while_training, str(tmp_path)) == [expected, expected]
    assert disk.find_damaged(disk.step_folder(tmp_path, 2), disk.list_files(disk.step_folder(tmp_path, 2))) is None


FULL = [(1, "rank_1.safetensors"), (0, "rank_0.safetensors")]


def save_on_full_disks(run_dir: str) -> list[str]:
    """What this rank raised each time, and that the ranks are in step afterwards."""
    ranks, texts = read_ranks(), []
    with process_group(ranks):
        manager = build_manager(Path(run_dir), ranks=ranks)
        for step, (full_rank, _) in enumerate(FULL, start=1):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(RunFailed) as caught:
                if ranks.rank == full_rank:
                    patch.setattr(safetensors.torch, "save_file", FullDisk())
                save(manager, step, ranks=ranks)
            texts.append(str(caught.value))
        save(manager, 9, ranks=ranks)
    return texts


def test_full_disk_of_one_rank_ends_the_save_on_all_with_its_words(tmp_path: Path) -> None:
    first, second = run_on(2, save_on_full_disks, str(tmp_path), timeout_s=60)
    assert first == second == [f"no space left for {name} (rank {rank} of 2)" for rank, name in FULL]
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
