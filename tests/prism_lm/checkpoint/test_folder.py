"""Checkpoint folders exist whole or not at all."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_lm.checkpoint import folder as disk


def write_partial(run_dir: Path, step: int) -> Path:
    partial = disk.partial_folder(run_dir, step)
    (partial / "ranks").mkdir(parents=True)
    (partial / "ranks" / "rank_0.pt").write_bytes(b"state" * 100)
    (partial / disk.WEIGHTS_NAME).write_bytes(bytes(step))
    return partial


def write_complete(run_dir: Path, step: int) -> Path:
    partial = write_partial(run_dir, step)
    entries = {name: disk.describe_file(partial / name) for name in disk.list_files(partial)}
    disk.publish(partial, disk.step_folder(run_dir, step), entries)
    return disk.step_folder(run_dir, step)


def test_checkpoint_exists_only_once_its_manifest_does(tmp_path: Path) -> None:
    folder = write_complete(tmp_path, 10)
    assert disk.list_published(tmp_path) == [folder]
    (folder / disk.MANIFEST_NAME).unlink()
    assert disk.list_published(tmp_path) == []


@pytest.mark.parametrize("content", ["", "{", '{"file": {}}', "[]"])
def test_damaged_manifest_is_an_error_and_stays(content: str, tmp_path: Path) -> None:
    manifest = write_complete(tmp_path, 10) / disk.MANIFEST_NAME
    manifest.write_text(content)
    assert disk.remove_incomplete(tmp_path) == []
    with pytest.raises(ValueError, match=r"step_10/manifest\.json must .*; restore it, or remove .*/step_10 to go on"):
        disk.check_sizes(manifest.parent)


def test_manifest_names_every_file_with_size_and_hash(tmp_path: Path) -> None:
    folder = write_complete(tmp_path, 3)
    entries = json.loads((folder / disk.MANIFEST_NAME).read_text())["files"]
    assert set(entries) == {"ranks/rank_0.pt", disk.WEIGHTS_NAME}
    assert entries[disk.WEIGHTS_NAME]["bytes"] == 3 and len(entries[disk.WEIGHTS_NAME]["sha256"]) == 64


def test_short_or_missing_file_is_named_and_its_checkpoint_stays(tmp_path: Path) -> None:
    folder = write_complete(tmp_path, 5)
    disk.check_sizes(folder)
    (folder / "ranks" / "rank_0.pt").write_bytes(b"state")
    with pytest.raises(ValueError, match=r"step_5/ranks/rank_0\.pt must be the 500 bytes .*, not 5 bytes; restore it"):
        disk.check_sizes(folder)
    (folder / "ranks" / "rank_0.pt").unlink()
    with pytest.raises(ValueError, match=r"rank_0\.pt must be the 500 bytes .*, not no file; restore it, or remove"):
        disk.check_sizes(folder)
    assert disk.remove_incomplete(tmp_path) == [] and disk.list_published(tmp_path) == [folder]


def test_checkpoints_that_cannot_be_looked_at_are_not_taken_for_absent(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the folder's place")
    with pytest.raises(NotADirectoryError):
        disk.list_published(tmp_path)
    (tmp_path / "checkpoints").unlink()
    (write_complete(tmp_path, 5) / disk.MANIFEST_NAME).rename(tmp_path / "elsewhere")
    (disk.step_folder(tmp_path, 5) / disk.MANIFEST_NAME).symlink_to(disk.MANIFEST_NAME)
    with pytest.raises(OSError, match="symbolic links"):
        disk.remove_incomplete(tmp_path)
    assert disk.step_folder(tmp_path, 5).exists()


def test_flipped_byte_is_found_by_its_hash(tmp_path: Path) -> None:
    folder = write_complete(tmp_path, 5)
    names = disk.list_files(folder)
    assert disk.find_damaged(folder, names) is None
    (folder / "ranks" / "rank_0.pt").write_bytes(b"statf" + b"state" * 99)
    disk.check_sizes(folder)
    assert disk.find_damaged(folder, names) == "ranks/rank_0.pt"


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        write_complete(tmp_path, step)
    assert [disk.read_step(folder) for folder in disk.list_published(tmp_path)] == [9, 20, 100]


def test_cleaning_removes_what_a_kill_left_and_nothing_else(tmp_path: Path) -> None:
    complete = write_complete(tmp_path, 1)
    partial = write_partial(tmp_path, 2)
    renamed = disk.step_folder(tmp_path, 3)
    write_partial(tmp_path, 3).rename(renamed)
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert sorted(disk.remove_incomplete(tmp_path)) == sorted([partial, renamed])
    assert complete.exists() and (tmp_path / "checkpoints" / "notes").exists()


def test_publishing_a_step_again_replaces_it(tmp_path: Path) -> None:
    write_complete(tmp_path, 4)
    folder = write_complete(tmp_path, 4)
    disk.check_sizes(folder)
    assert disk.list_published(tmp_path) == [folder]


def test_unreadable_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json must hold JSON; .*; write it again"):
        disk.read_json(tmp_path / "a.json", remedy="write it again")


@given(
    steps=st.lists(st.integers(1, 1000), unique=True, max_size=30),
    keep_last=st.integers(1, 5),
    keep_every=st.sampled_from([0, 1, 7, 100]),
)
def test_pruning_keeps_the_newest_and_the_kept_multiples(steps: list[int], keep_last: int, keep_every: int) -> None:
    removed = disk.choose_removals(steps, keep_last=keep_last, keep_every_steps=keep_every)
    kept = set(steps) - set(removed)
    assert set(removed) <= set(steps) and len(removed) == len(set(removed))
    assert set(sorted(steps)[-keep_last:]) <= kept
    for step in kept - set(sorted(steps)[-keep_last:]):
        assert keep_every and step % keep_every == 0
    assert not [step for step in removed if keep_every and step % keep_every == 0]
