import importlib.metadata
import shutil
from unittest import mock

import pytest

from launcher.doctor import examine, main


def find(subject: str):
    return next(finding for finding in examine() if finding.subject == subject)


def test_machine_that_runs_the_tests_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for subject in ("python", "torch", "triton", "deepspeed", "disk", "slurm"):
        assert f" {subject} " in text
    assert text.splitlines()[-1] == "ready"


def test_missing_package_fails_with_the_command_that_installs_it(capsys: pytest.CaptureFixture[str]) -> None:
    real = importlib.metadata.version

    def pretend(name: str) -> str:
        if name == "deepspeed":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    with mock.patch("importlib.metadata.version", pretend):
        assert main([]) == 1
    text = capsys.readouterr().out
    assert "fail  deepspeed" in text and "pip install" in text
    assert text.splitlines()[-1] == "not ready: deepspeed"


def test_missing_compiler_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert (find("compiler").verdict, "g++" in find("compiler").meaning) == ("note", True)
    assert find("slurm").verdict == "note"


def test_full_disk_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    full = mock.Mock(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    assert find("disk").verdict == "fail"
    assert find("shared memory").verdict == "fail"
