import importlib.util
from pathlib import Path

import pytest

from launcher.__main__ import EXIT_USAGE, main
from launcher.demo import DemoFailed, check_floors_beaten, format_table

ROWS = {
    "unigram": {"parameters": 10, "tokens": 1e6, "loss_nats": 6.0, "bits_per_byte": 3.0},
    "bigram": {"parameters": 20, "tokens": 1e6, "loss_nats": 4.0, "bits_per_byte": 2.0},
    "PRISM, L=2": {"parameters": 30, "tokens": 5e5, "loss_nats": 3.5, "bits_per_byte": 1.8},
    "Gated DeltaNet": {"parameters": 31, "tokens": 5e5, "loss_nats": 3.4, "bits_per_byte": 1.7},
}


def test_table_is_sorted_with_the_best_last() -> None:
    names = [line.split("  ")[0] for line in format_table(ROWS).splitlines()[3:]]
    assert names == ["unigram", "bigram", "PRISM, L=2", "Gated DeltaNet"]


def test_demo_fails_where_a_model_is_no_better_than_a_bigram() -> None:
    check_floors_beaten(ROWS)
    worse = {**ROWS, "PRISM, L=2": {**ROWS["PRISM, L=2"], "bits_per_byte": 2.0}}
    with pytest.raises(DemoFailed, match=r"PRISM, L=2 must be below 2.000 bits/byte"):
        check_floors_beaten(worse)


def test_missing_matplotlib_is_said_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo", "--folder", str(tmp_path / "demo")]) == EXIT_USAGE
    assert "pip install -e '.[demo]'" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_folder_without_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--folder", str(tmp_path / "demo"), "--text", str(tmp_path)]) == EXIT_USAGE
    assert f"--text={tmp_path} must be a folder with .txt files" in capsys.readouterr().err
