"""Damaged checkpoints, full and read-only disks, checkpoints of something else: the checkpoint before is used where
that is right, otherwise one error names the file, and nothing is overwritten."""

import hashlib
import json
import os
import resource
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import run_prepare
from data_pipeline.synthetic import write_synthetic_dataset, write_synthetic_text
from launcher.config import RunConfig, load_config
from launcher.environment import detect_environment
from launcher.train import build_run as build_launched_run
from launcher.train import train as launch
from prism_lm.checkpoint import folder as disk
from prism_lm.checkpoint.manager import CheckpointConfig, CheckpointManager
from prism_lm.parallel.collectives import RunFailed
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.config import TrainConfig
from prism_lm.train.loop import run_training
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.session import choose_start
from prism_lm.train.state import TrainRun
from tests.data_pipeline.disks import mount, unmount
from tests.harness import build_run, read_losses, run_on

STEPS, LONGER = 6, 8
KINDS = [
    "model.safetensors",
    "optimizer/rank_0.safetensors",
    "optimizer/rank_1.safetensors",
    "optimizer/index.json",
    "ranks/rank_1.pt",
    "probe.safetensors",
]
# What the records of a start that is refused may differ in: the lock of the folder, and what DeepSpeed says.
UNRECORDED = {".owner.lock", "owner.json", "deepspeed.log"}
GiB = 2**30
Usage = namedtuple("Usage", "total used free")


def build_damaged_run(run_dir: Path, *, steps: int = STEPS, asynchronous: bool = False) -> TrainRun:
    train = TrainConfig(
        steps=steps,
        global_batch_rows=8,
        micro_batch_rows=2,
        log_every_steps=1,
        schedule=ScheduleConfig(kind="constant", warmup_steps=1),
        checkpoint=CheckpointConfig(save_every_steps=2, keep_last=2, asynchronous=asynchronous),
    )
    return build_run(run_dir, train)


def train_run(run_dir: str, steps: int, asynchronous: bool = False) -> str:
    return run_training(build_damaged_run(Path(run_dir), steps=steps, asynchronous=asynchronous))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that ended, with the checkpoints of its steps 4 and 6."""
    run_dir = tmp_path_factory.mktemp("damage") / "source"
    assert run_on(2, train_run, str(run_dir), STEPS) == ["finished"] * 2
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_4", "step_6"]
    return run_dir


@pytest.fixture
def run_dir(source: Path, tmp_path: Path) -> Path:
    """A copy that has not ended yet."""
    copy = Path(shutil.copytree(source, tmp_path / "run"))
    (copy / "result.json").unlink()
    return copy


def read_tree(folder: Path) -> dict[str, str]:
    """The hash of every file that a refused start must leave as it was."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in UNRECORDED]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refuse(run: TrainRun) -> str:
    """What a whole start of one process says, having left everything as it was."""
    before = read_tree(run.run_dir)
    with mock.patch.dict(os.environ), pytest.raises((ValueError, RunFailed)) as caught:
        run_training(run)
    assert read_tree(run.run_dir) == before
    return str(caught.value)


def check(run_dir: Path) -> str:
    """What the checks of a start say of the newest checkpoint, without the start around them; empty when whole."""
    run = build_damaged_run(run_dir)
    try:
        start = choose_start(run)
        assert start.folder is not None
        CheckpointManager(run_dir, run.train.checkpoint, Ranks()).verify(start.folder)
    except (ValueError, RunFailed) as error:
        return str(error)
    return ""


def test_checkpoint_of_two_processes_holds_every_kind_of_file(run_dir: Path) -> None:
    folder = disk.step_folder(run_dir, STEPS)
    assert {*KINDS, "trainer.json", "ranks/rank_0.pt"} == {*disk.list_files(folder)}
    assert check(run_dir) == ""


def test_file_cut_short_at_any_boundary_is_named_and_nothing_is_overwritten(run_dir: Path) -> None:
    folder = disk.step_folder(run_dir, STEPS)
    for name in [*disk.list_files(folder), disk.MANIFEST_NAME]:
        whole = (folder / name).read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 1):
            (folder / name).write_bytes(whole[:size])
            text = refuse(build_damaged_run(run_dir))
            assert f"step_{STEPS}/{name} must " in text and f"remove {folder}" in text, (name, size, text)
        (folder / name).write_bytes(whole)
    assert check(run_dir) == ""


def flip(path: Path, index: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[index] ^= bit
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", [*KINDS, "trainer.json"])
def test_one_byte_flipped_in_a_file_is_found_by_its_hash(name: str, run_dir: Path) -> None:
    path = disk.step_folder(run_dir, STEPS) / name
    size = path.stat().st_size
    for index in (0, 8, size // 2, size - 1):
        flip(path, index, 1)
        text = refuse(build_damaged_run(run_dir))
        assert f"step_{STEPS}/{name} must match its hash in manifest.json; restore it, or remove" in text, (index, text)
        flip(path, index, 1)
    assert check(run_dir) == ""


@pytest.mark.parametrize(("bit", "every"), [(1, 1), (128, 40)])
def test_any_byte_flipped_in_the_trainer_file_blames_that_file_and_no_setting(
    bit: int, every: int, run_dir: Path
) -> None:
    path = disk.step_folder(run_dir, STEPS) / disk.TRAINER_NAME
    for index in range(0, path.stat().st_size, every):
        flip(path, index, bit)
        text = check(run_dir)
        assert f"step_{STEPS}/{disk.TRAINER_NAME} must" in text, (
            index,
            path.read_bytes()[index - 20 : index + 20],
            text,
        )
        flip(path, index, bit)


@pytest.mark.parametrize(("bit", "every"), [(1, 1), (128, 40)])
def test_any_byte_flipped_in_the_manifest_is_an_error_in_words(bit: int, every: int, run_dir: Path) -> None:
    path = disk.step_folder(run_dir, STEPS) / disk.MANIFEST_NAME
    for index in range(0, path.stat().st_size, every):
        flip(path, index, bit)
        text = check(run_dir)
        assert f"step_{STEPS}/" in text and "restore it, or remove" in text, (
            index,
            path.read_bytes()[index - 20 :][:40],
        )
        flip(path, index, bit)


def test_checkpoint_without_its_marker_gives_way_to_the_one_before(source: Path, run_dir: Path) -> None:
    (disk.step_folder(run_dir, STEPS) / disk.MANIFEST_NAME).unlink()
    kept = read_tree(disk.step_folder(run_dir, 4))
    assert choose_start(build_damaged_run(run_dir)).state.step == 4
    assert run_on(2, train_run, str(run_dir), STEPS) == ["finished"] * 2
    assert read_losses(run_dir) == read_losses(source)
    assert read_tree(disk.step_folder(run_dir, 4)) == kept
    weights = [disk.step_folder(folder, STEPS) / disk.WEIGHTS_NAME for folder in (source, run_dir)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("step", [5, 7])
def test_folder_renamed_to_another_step_is_refused_by_both_steps(step: int, run_dir: Path) -> None:
    disk.step_folder(run_dir, STEPS).rename(disk.step_folder(run_dir, step))
    text = refuse(build_damaged_run(run_dir))
    assert f"step_{step}" in text and f"step={STEPS}" in text, text


def test_older_damaged_checkpoint_does_not_keep_the_newest_from_being_used(run_dir: Path) -> None:
    flip(disk.step_folder(run_dir, 4) / disk.WEIGHTS_NAME, 100, 1)
    assert check(run_dir) == "" and choose_start(build_damaged_run(run_dir)).state.step == STEPS


@contextmanager
def own_disk(folder: Path, spare_bytes: int) -> Generator[bool, None, None]:
    """The folder's files on a tmpfs of their own with that much room besides; yields whether that could be mounted."""
    content = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    held_bytes = sum(-(-len(held) // 4096) * 4096 for held in content.values()) + 64 * 4096
    if not mount(folder, f"size={held_bytes + spare_bytes}"):
        yield False
        return
    try:
        for name, held in content.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(held)
        yield True
    finally:
        unmount(folder)


def fail_to_save(run_dir: str, asynchronous: bool, hides_fullness: bool, limit_bytes: int | None) -> str:
    """What this rank says when it goes on; the disk seems to have room until it is written to, as it does where others
    fill it meanwhile. `limit_bytes` stands in for a disk that could not be mounted."""
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunFailed) as caught:
        if hides_fullness:
            patch.setattr(shutil, "disk_usage", lambda path: Usage(GiB, 0, GiB))
        train_run(run_dir, LONGER, asynchronous)
    return str(caught.value)


def resize(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


@pytest.mark.parametrize(
    ("asynchronous", "hides_fullness"), [(False, True), (True, True), (False, False)], ids=["sync", "async", "known"]
)
def test_full_disk_in_a_save_leaves_the_checkpoint_before_whole_and_used(
    asynchronous: bool, hides_fullness: bool, run_dir: Path
) -> None:
    checkpoints = run_dir / "checkpoints"
    before = read_tree(checkpoints)
    size = (disk.step_folder(run_dir, STEPS) / "optimizer/rank_0.safetensors").stat().st_size
    with own_disk(checkpoints, spare_bytes=size) as is_mounted:
        limit_bytes = None if is_mounted else size // 2
        first, second = run_on(
            2, fail_to_save, str(run_dir), asynchronous, hides_fullness or not is_mounted, limit_bytes
        )
        assert first == second
        if hides_fullness or not is_mounted:
            assert "No space left" in first or "File too large" in first, first
            assert f".partial_step_{LONGER}/" in first, first
        else:
            assert first.startswith(f"run_dir={run_dir} must have "), first
        left = {name: held for name, held in read_tree(checkpoints).items() if not name.startswith(".partial")}
        assert left == before
        result = json.loads((run_dir / "result.json").read_text())
        assert (result["status"], result["error"]) == ("failed", first)
        if is_mounted:
            resize(checkpoints, "size=64m")
        assert choose_start(build_damaged_run(run_dir, steps=LONGER)).state.step == STEPS
        assert run_on(2, train_run, str(run_dir), LONGER) == ["finished"] * 2
        assert [*read_losses(run_dir)] == [*range(1, LONGER + 1)]
        assert sorted(path.name for path in checkpoints.iterdir()) == ["step_6", "step_8"]


def test_read_only_checkpoint_folder_is_an_error_that_names_it_and_changes_nothing(run_dir: Path) -> None:
    checkpoints = run_dir / "checkpoints"
    before = read_tree(checkpoints)
    with own_disk(checkpoints, spare_bytes=64 << 20) as is_mounted:
        if is_mounted:
            resize(checkpoints, "ro")
        first, second = run_on(2, fail_to_save, str(run_dir), False, True, None if is_mounted else 4096)
        assert first == second
        words = ("Read-only file system", "File too large")
        assert any(word in first for word in words) and f"{checkpoints}/.partial_step_{LONGER}" in first, first
        left = {name: held for name, held in read_tree(checkpoints).items() if not name.startswith(".partial")}
        assert left == before


def test_read_only_run_folder_is_an_error_that_names_it_and_changes_nothing(run_dir: Path) -> None:
    with own_disk(run_dir, spare_bytes=64 << 20) as is_mounted:
        assert is_mounted, "a read-only run folder needs the right to mount"
        resize(run_dir, "ro")
        text = refuse(build_damaged_run(run_dir))
        assert "Read-only file system" in text and str(run_dir) in text, text


def test_checkpoint_of_another_model_is_refused_by_its_fingerprint(run_dir: Path) -> None:
    other = replace(build_damaged_run(run_dir, steps=LONGER), fingerprints={"model": "another"})
    text = refuse(other)
    assert text.startswith("model.* (fingerprint another) must equal model.* (fingerprint tiny) of the checkpoint"), (
        text
    )


VOCAB_SIZE, ROW_TOKENS = 320, 64


def prepare(folder: Path, *, documents: int, tokenizer: Path | None = None, seed: int = 0) -> Path:
    """Prepared data; with a tokenizer that is there, only the rows can differ."""
    if tokenizer is None:
        return write_synthetic_dataset(
            folder, vocab_size=VOCAB_SIZE, row_tokens=ROW_TOKENS, documents=documents, seed=seed, shard_mib=0.01
        )
    text = write_synthetic_text(folder.with_name(f"{folder.name}-text"), documents=documents, seed=seed)
    config = PrepareConfig(
        output=str(folder),
        inputs={"alpha": str(text / "alpha.txt"), "beta": str(text / "beta.txt")},
        text_document="paragraph",
        tokenizer=str(tokenizer),
        row_tokens=ROW_TOKENS,
        validation_fraction=0.1,
        test_fraction=0.1,
        shard_mib=0.01,
        workers=1,
    )
    run_prepare(config, report=lambda line: None)
    return folder


def load_launched(run_dir: Path, data: Path) -> RunConfig:
    sizes = [
        f"run_dir={run_dir}",
        f"data.path={data}",
        f"data.row_tokens={ROW_TOKENS}",
        f"model.vocab_size={VOCAB_SIZE}",
    ]
    training = ["train.steps=2", "train.schedule.warmup_steps=1", "train.eval_every_steps=0", "data.workers=0"]
    return load_config(RunConfig, str(Path("configs/train/tiny.yaml").resolve()), [*sizes, *training])


def launch_run(run_dir: str, data: str) -> str:
    return launch(load_launched(Path(run_dir), Path(data)), detect_environment({}))


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of the command line and its data."""
    folder = tmp_path_factory.mktemp("launched")
    data = prepare(folder / "data", documents=100)
    assert run_on(1, launch_run, str(folder / "run"), str(data)) == ["finished"]
    (folder / "run" / "result.json").unlink()
    return folder / "run", data


def refuse_data(run_dir: Path, data: Path) -> str:
    before = read_tree(run_dir / "checkpoints")
    with pytest.raises(ValueError) as caught:
        choose_start(build_launched_run(load_launched(run_dir, data), detect_environment({})))
    assert read_tree(run_dir / "checkpoints") == before
    return str(caught.value)


def test_data_with_a_shard_added_is_refused_with_the_difference_of_the_manifests(
    launched: tuple[Path, Path], tmp_path: Path
) -> None:
    run_dir, data = launched
    added = prepare(tmp_path / "data", documents=120, tokenizer=data / "tokenizer.model")
    text = refuse_data(run_dir, added)
    counts = [count_shards(folder) for folder in (added, data)]
    assert counts[0] > counts[1]
    assert text.startswith("data.path") and f"{counts[0]} shards" in text and f"{counts[1]} shards" in text, text


def count_shards(data: Path) -> int:
    splits = json.loads((data / "manifest.json").read_text())["splits"]
    return sum(len(source["shards"]) for source in splits["train"].values())


def test_data_of_another_tokenizer_is_refused_by_that_name(launched: tuple[Path, Path], tmp_path: Path) -> None:
    run_dir, _ = launched
    text = refuse_data(run_dir, prepare(tmp_path / "data", documents=100, seed=1))
    assert "tokenizer" in text and "of the checkpoint" in text, text
