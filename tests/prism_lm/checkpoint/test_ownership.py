"""A run folder belongs to one start at a time."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from prism_lm.checkpoint.ownership import OWNER_NAME, Owner, claim, read_owner
from prism_lm.parallel.collectives import RunFailed
from prism_lm.parallel.process_identity import identify_process

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def change(run_dir: Path, **fields: Any) -> None:
    """Edits owner.json in place, as a process that is somewhere else would have written it."""
    path = run_dir / OWNER_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def read_tree(run_dir: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in run_dir.iterdir()}


def touch_soon(run_dir: Path, when_s: float, mtime_s: float | None = None) -> threading.Thread:
    def touch() -> None:
        time.sleep(when_s)
        os.utime(run_dir / OWNER_NAME, None if mtime_s is None else (mtime_s, mtime_s))

    thread = threading.Thread(target=touch)
    thread.start()
    return thread


def test_second_start_is_refused_by_name_and_leaves_every_file_as_it_was(tmp_path: Path) -> None:
    owner = claim(tmp_path)
    before = read_tree(tmp_path)
    with pytest.raises(ValueError, match=rf"^run_dir={tmp_path} is in use by process {os.getpid()} on \S+ since 20.*;"):
        claim(tmp_path)
    assert read_tree(tmp_path) == before
    owner.check()
    owner.release()


def test_folder_released_cleanly_is_free(tmp_path: Path) -> None:
    claim(tmp_path).release()
    assert read_owner(tmp_path) is None
    claim(tmp_path).release()


def test_dead_owner_of_this_host_is_followed_at_once(tmp_path: Path) -> None:
    program = (
        f"from pathlib import Path; from prism_lm.checkpoint.ownership import claim; claim(Path({str(tmp_path)!r}))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    dead = read_owner(tmp_path)
    assert dead is not None and dead.process.is_alive() is False
    began_s = time.monotonic()
    claim(tmp_path).release()
    assert time.monotonic() - began_s < 2.0


def test_number_given_to_another_process_is_no_sign_of_life(tmp_path: Path) -> None:
    claim(tmp_path)
    change(tmp_path, process_start_time=identify_process().process_start_time - 1)
    claim(tmp_path).release()


def test_silent_owner_of_another_host_is_followed_after_the_watch(tmp_path: Path) -> None:
    lost = claim(tmp_path, beat_s=60.0)
    change(tmp_path, host="other", boot_id="another boot")
    began_s = time.monotonic()
    owner = claim(tmp_path, watch_s=1.0)
    assert 1.0 <= time.monotonic() - began_s < 3.0
    with pytest.raises(RunFailed, match=r"^another start took this run over at 20\S+ on .*; this one ends without"):
        lost.check()
    owner.check()
    owner.release()


def test_beating_owner_of_another_host_is_left_alone(tmp_path: Path) -> None:
    claim(tmp_path, beat_s=60.0)
    change(tmp_path, host="other", boot_id="another boot")
    thread = touch_soon(tmp_path, 0.4)
    with pytest.raises(ValueError, match=r"is in use by process \d+ on other since"):
        claim(tmp_path, watch_s=5.0)
    thread.join()


def test_beat_of_a_clock_gone_backwards_is_a_beat(tmp_path: Path) -> None:
    claim(tmp_path, beat_s=60.0)
    change(tmp_path, host="other", boot_id="another boot")
    thread = touch_soon(tmp_path, 0.4, mtime_s=1e9)
    with pytest.raises(ValueError, match="is in use by process"):
        claim(tmp_path, watch_s=5.0)
    thread.join()


def test_silent_owner_with_a_clock_ahead_is_followed(tmp_path: Path) -> None:
    claim(tmp_path, beat_s=60.0)
    change(tmp_path, host="other", boot_id="another boot")
    os.utime(tmp_path / OWNER_NAME, (time.time() + 1e6, time.time() + 1e6))
    claim(tmp_path, watch_s=0.5).release()


def test_container_of_the_same_host_is_watched_and_not_looked_up(tmp_path: Path) -> None:
    claim(tmp_path, beat_s=60.0)
    change(tmp_path, pid_namespace="pid:[1]", pid=1)
    thread = touch_soon(tmp_path, 0.4)
    with pytest.raises(ValueError, match="is in use by process 1 on"):
        claim(tmp_path, watch_s=5.0)
    thread.join()


def test_restart_by_slurm_follows_at_once_and_the_former_node_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    lost = claim(tmp_path, beat_s=60.0)
    change(tmp_path, host="other", boot_id="another boot")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    owner = claim(tmp_path, watch_s=60.0)
    with pytest.raises(RunFailed):
        lost.check()
    lost.release()
    owner.check()
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    with pytest.raises(ValueError, match="is in use"):
        claim(tmp_path)
    owner.release()


def test_owner_that_beats_moves_its_files_time_until_it_loses_the_folder(tmp_path: Path) -> None:
    owner = claim(tmp_path, beat_s=0.05)
    path = tmp_path / OWNER_NAME
    os.utime(path, (1e9, 1e9))
    time.sleep(0.5)
    assert path.stat().st_mtime > 1e9
    change(tmp_path, token="another")
    time.sleep(0.3)
    os.utime(path, (1e9, 1e9))
    time.sleep(0.3)
    assert path.stat().st_mtime == 1e9
    owner.release()
    assert path.exists()


def test_owner_loses_where_its_successor_has_ended_already(tmp_path: Path) -> None:
    claim(tmp_path).release()
    with pytest.raises(RunFailed, match="took this run over and has ended since"):
        Owner(tmp_path, "a token").check()


def test_damaged_owner_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / OWNER_NAME).write_text("{}")
    with pytest.raises(ValueError, match=r"owner\.json must name an owner; .* remove the file once no process"):
        claim(tmp_path)


def test_of_many_starts_in_one_moment_one_gets_the_folder(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from prism_lm.checkpoint import ownership\n"
        "read = ownership.read_owner\n"
        "def read_slowly(run_dir):\n"
        "    held = read(run_dir); time.sleep(0.2); return held\n"
        "ownership.read_owner = read_slowly\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        f"try: ownership.claim(Path({str(tmp_path)!r})); print('mine', flush=True); sys.stdin.read()\n"
        "except ValueError: print('refused', flush=True)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    starts = [subprocess.Popen([sys.executable, "-c", program], **pipes) for _ in range(5)]
    assert [start.stdout.readline() for start in starts] == ["ready\n"] * 5
    for start in starts:
        start.stdin.write("go\n")
        start.stdin.flush()
    answers = [start.stdout.readline().strip() for start in starts]
    for start in starts:
        start.communicate("")
    assert sorted(answers) == ["mine"] + ["refused"] * 4
