"""`prism prepare` as typed: summary, second run, errors."""

from pathlib import Path

import pytest

from data_pipeline.synthetic import write_synthetic_text
from launcher.__main__ import main


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_synthetic_text(tmp_path / "text", documents=40, seed=1)


def arguments(text: Path, output: Path, *more: str) -> list[str]:
    keys = [f"output={output}", f"inputs.alpha={text / 'alpha.txt'}", f"inputs.beta={text / 'beta.txt'}"]
    return ["prepare", *keys, "text_document=paragraph", "vocab_size=400", "row_tokens=32", "workers=1", *more]


def test_it_prints_progress_and_a_summary_and_does_nothing_the_second_time(text, tmp_path, capsys) -> None:
    assert main(arguments(text, tmp_path / "data")) == 0
    first = capsys.readouterr()
    assert "training a tokenizer of 400 pieces" in first.err and "part 1/1" in first.err and "tokens/s" in first.err
    assert "bytes/token" in first.out and "alpha" in first.out and "400 pieces, rows of 32 tokens (uint16)" in first.out
    assert main(arguments(text, tmp_path / "data")) == 0
    second = capsys.readouterr()
    assert "nothing to do" in second.err and second.out == first.out


def test_a_configuration_file_and_overrides_go_together(text, tmp_path) -> None:
    config = tmp_path / "prepare.yaml"
    config.write_text(f"output: {tmp_path / 'data'}\ninputs:\n  alpha: {text / 'alpha.txt'}\nvocab_size: 400\n")
    assert main(["prepare", str(config), "text_document=paragraph", "row_tokens=16", "workers=1"]) == 0
    assert (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["plain_text", "slimpajama"])
def test_the_shipped_files_are_valid_and_lack_only_their_input(tmp_path, capsys, name) -> None:
    assert main(["prepare", f"configs/data/{name}.yaml", f"output={tmp_path / 'data'}"]) == 2
    assert "error: inputs={} must name at least one file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["row_tokens=64"], "row_tokens=64 must equal row_tokens=32, with which"),
        (["vocab_size=10"], "vocab_size=10 must be at least 300"),
        (["vocabsize=10"], "vocabsize must be a key of this configuration"),
        (["inputs.alpha=/nonexistent"], "inputs.alpha=/nonexistent must exist"),
    ],
)
def test_what_is_typed_wrong_is_said_in_one_line(text, tmp_path, capsys, more, message) -> None:
    main(arguments(text, tmp_path / "data"))
    capsys.readouterr()
    assert main(arguments(text, tmp_path / "data", *more)) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_bad_data_ends_with_code_one(text, tmp_path, capsys) -> None:
    (text / "beta.txt").write_bytes(b"\xff\xfe")
    assert main(arguments(text, tmp_path / "data")) == 1
    assert "beta.txt is not UTF-8 at byte 0" in capsys.readouterr().err


def test_help_names_every_key_with_its_meaning(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["prepare", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "prism prepare output=data/books" in text
    assert all(key in text for key in ("vocab_size", "part_mib", "split_by", "text_document"))
