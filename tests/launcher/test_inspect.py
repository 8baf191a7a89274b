"""`prism inspect` shows rows as text and checks files."""

from pathlib import Path

import pytest

from data_pipeline.synthetic import generate_text, write_synthetic_dataset
from launcher.__main__ import main


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "data"
    return write_synthetic_dataset(folder, vocab_size=400, documents=40, row_tokens=1000)


def test_rows_are_text_with_the_boundaries_of_documents_and_padding(prepared, capsys) -> None:
    assert main(["inspect", str(prepared), "--split", "validation", "--rows", "99"]) == 0
    shown = capsys.readouterr().out
    assert "(validation, alpha)" in shown and "(validation, beta)" in shown
    assert "[document begins," in shown and "[document ends]" in shown and "tokens of padding]" in shown
    flat = shown.replace("\n    ", "\n")
    assert any(generate_text(index).strip() in flat for index in range(40))


def test_a_document_across_rows_says_that_it_goes_on(prepared, capsys) -> None:
    assert main(["inspect", str(prepared), "--first", "0", "--rows", "2"]) == 0
    one, two = capsys.readouterr().out.split("row 1 of")
    assert "[document goes on in the next row]" in one and "[document goes on," in two


def test_verify_counts_the_files_and_names_bad_ones(prepared, capsys) -> None:
    assert main(["inspect", str(prepared), "--verify"]) == 0
    assert "files match their sizes and hashes" in capsys.readouterr().out
    shard = prepared / "train" / "beta" / "shard.000000.mds.zstd"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert main(["inspect", str(prepared), "--verify"]) == 1
    assert f"error: {shard} does not match its sha256" in capsys.readouterr().err
    shard.write_bytes(whole)


def test_a_row_or_folder_that_is_not_there_is_said_in_one_line(prepared, tmp_path, capsys) -> None:
    assert main(["inspect", str(prepared), "--first", "99999"]) == 2
    assert "error: --first=99999 must be a row of the train split" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 1
    assert f"error: {tmp_path}/manifest.json is missing" in capsys.readouterr().err
    assert main(["inspect", "s3://bucket/data", "--verify"]) == 2
    assert "must be a folder for --verify" in capsys.readouterr().err
