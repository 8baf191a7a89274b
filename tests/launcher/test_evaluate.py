"""What `prism evaluate` leaves on the disk."""

import json
from pathlib import Path

import pytest

from launcher.evaluate import write_figures


def test_two_that_write_a_file_at_once_leave_it_whole_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, replace = tmp_path / "evaluations" / "test_step_1.json", Path.replace

    def write_between(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        write_figures(file, {"writer": 2})
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", write_between)
    write_figures(file, {"writer": 1})
    assert json.loads(file.read_text()) == {"writer": 1}
    assert list(file.parent.iterdir()) == [file]


def test_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_step_1.json"
    write_figures(file, {"writer": 1})
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(Path, "replace", lambda path, target: (_ for _ in ()).throw(OSError("full")))
        write_figures(file, {"writer": 2})
    assert json.loads(file.read_text()) == {"writer": 1} and list(tmp_path.iterdir()) == [file]
