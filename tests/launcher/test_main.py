import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from launcher.__main__ import EXIT_FAILED, EXIT_USAGE, VERBS, main

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("arguments", [[], ["--help"], ["help"]])
def test_overview_shows_every_verb_with_one_runnable_example(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for name, verb in VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(verb.summary)}$", text, flags=re.MULTILINE)
        assert verb.example.startswith(f"prism {name}")


@pytest.mark.parametrize("verb", list(VERBS))
def test_verb_help_names_the_verb_and_exits_with_zero(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert f"usage: prism {verb}" in capsys.readouterr().out


def test_unknown_verb_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == EXIT_USAGE
    assert capsys.readouterr().err == "error: prism trian must be a verb; did you mean train?\n"


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def raise_it(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(importlib.import_module("launcher.doctor"), "main", raise_it)


def test_data_error_is_one_line_and_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, DataError("shard x is missing; put it back"))
    assert main(["doctor"]) == EXIT_FAILED
    assert capsys.readouterr().err == "error: shard x is missing; put it back\n"


def test_error_of_a_user_is_said_by_rank_0_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "missing.yaml"]) == EXIT_USAGE
    assert capsys.readouterr().err == ""


def test_error_of_a_library_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, RuntimeError("from inside torch"))
    with pytest.raises(RuntimeError, match="from inside torch"):
        main(["doctor"])
    monkeypatch.setattr(importlib.import_module("launcher.doctor"), "main", lambda arguments: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        main(["doctor"])


def test_reader_that_has_had_enough_gets_no_traceback() -> None:
    command = f"{sys.executable} -m launcher sizes | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("name") and done.stderr == ""
