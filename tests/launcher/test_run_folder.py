"""What a run folder tells: who runs it, which checkpoints are sound, the last records."""

import json
import os
import time
from pathlib import Path

import pytest

from launcher.run_folder import (
    align,
    find_newest_sound,
    find_owner,
    list_saved,
    read_last_records,
    spell_age,
    spell_bytes,
    spell_owner,
)
from tests.launcher.run_folders import write_checkpoint, write_lines, write_owner


def test_owner_on_this_machine_is_believed_by_its_process(tmp_path: Path) -> None:
    assert find_owner(tmp_path) is None
    write_owner(tmp_path, silent_s=9999)
    owner = find_owner(tmp_path)
    assert owner is not None and spell_owner(owner).startswith(f"process {os.getpid()} on ")
    write_owner(tmp_path, process_start_time="1")
    assert find_owner(tmp_path) is None
    write_owner(tmp_path, pid=2**22 + 1)
    assert find_owner(tmp_path) is None


@pytest.mark.parametrize("elsewhere", [{"pid_namespace": "a container's"}, {"boot_id": "another"}])
def test_owner_elsewhere_is_believed_by_its_heartbeat(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    write_owner(tmp_path, **elsewhere)
    assert find_owner(tmp_path) is not None
    write_owner(tmp_path, silent_s=90, **elsewhere)
    assert find_owner(tmp_path) is None


def test_owner_file_that_cannot_be_read_names_nobody(tmp_path: Path) -> None:
    for content in ("", "{", "[1]", '{"host": "a"}'):
        (tmp_path / "owner.json").write_text(content)
        assert find_owner(tmp_path) is None


def test_newest_sound_checkpoint_is_found_past_damaged_and_incomplete_ones(tmp_path: Path) -> None:
    assert find_newest_sound(tmp_path) is None and list_saved(tmp_path) == []
    folders = {step: write_checkpoint(tmp_path, step) for step in (20, 100, 9, 30)}
    (folders[100] / "model.safetensors").write_bytes(b"short")
    (folders[30] / "manifest.json").unlink()
    (tmp_path / "checkpoints" / ".partial_step_110").mkdir()
    newest = find_newest_sound(tmp_path)
    assert newest is not None and newest.folder == folders[20] and newest.trainer["tokens"] == 2000
    problems = {saved.folder.name: saved.problem for saved in list_saved(tmp_path)}
    assert list(problems) == ["step_9", "step_20", "step_30", "step_100", ".partial_step_110"]
    assert problems["step_9"] is None and problems["step_30"] == problems[".partial_step_110"] == "incomplete"
    assert (
        problems["step_100"]
        == "damaged: model.safetensors must be the 2048 bytes that manifest.json names, not 5 bytes"
    )


def test_age_of_a_file_from_the_future_is_zero(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 20)
    ahead_s = time.time() + 3600
    os.utime(folder / "manifest.json", (ahead_s, ahead_s))
    assert [saved.age_s for saved in list_saved(tmp_path)] == [0.0]


def test_torn_line_and_long_file_still_give_the_last_whole_records(tmp_path: Path) -> None:
    assert read_last_records(tmp_path) is None
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "tokens": 8 * step, "train/loss_nats": 1.0 / step} for step in range(1, 5001)]
    write_lines(path, *lines, {"step": 5001, "tokens": 40008, "validation/loss_nats": 2.0, "train/loss_nats": None})
    with path.open("a") as file:
        file.write('{"step": 5002, "tok')
    records = read_last_records(tmp_path)
    assert records is not None and len(records.lines) < 5000
    assert records.lines[-1]["step"] == 5001
    assert (records.find("train/loss_nats"), records.find("validation/loss_nats")) == (1.0 / 5000, 2.0)
    assert records.find("speed/eta_s") is None
    path.write_text(json.dumps({"step": 1})[:-1])
    assert read_last_records(tmp_path) is None


def test_sizes_ages_and_tables_are_spelled_for_a_reader() -> None:
    assert [spell_bytes(size) for size in (0, 999, 1024, 22_334_000, 3 * 2**40)] == [
        "0 B",
        "999 B",
        "1.0 KiB",
        "21.3 MiB",
        "3.0 TiB",
    ]
    assert [spell_age(age_s) for age_s in (5, 300, 9000, 200_000)] == ["5 s", "5 min", "2.5 h", "2.3 days"]
    assert align([["a", "bb"], ["ccc", ""]]) == ["a    bb", "ccc"]
