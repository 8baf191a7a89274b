"""The manifest notices what was altered, and its checks name the key to change."""

import json
from dataclasses import replace

import pytest

from data_pipeline.errors import DataError
from data_pipeline.manifest import (
    check_row_tokens,
    check_tokenizer,
    check_vocabulary,
    read_manifest,
    write_manifest,
)
from data_pipeline.synthetic import generate_text
from data_pipeline.tokenizer import Tokenizer, load_tokenizer, train_tokenizer


def test_it_is_read_back_equal(prepared, tmp_path) -> None:
    manifest = read_manifest(prepared / "manifest.json")
    write_manifest(manifest, tmp_path)
    assert read_manifest(tmp_path / "manifest.json") == manifest
    assert read_manifest(tmp_path / "manifest.json").fingerprint == manifest.fingerprint


def test_any_change_of_content_changes_the_fingerprint(prepared) -> None:
    manifest = read_manifest(prepared / "manifest.json")
    held = manifest.splits["train"]["alpha"]
    shard = replace(held.shards[0], sha256="0" * 64)
    other = replace(manifest, splits={"train": {"alpha": replace(held, shards=(shard, *held.shards[1:]))}})
    assert len({manifest.fingerprint, other.fingerprint, replace(manifest, eos_id=5).fingerprint}) == 3


def test_a_missing_damaged_or_altered_manifest_is_named(prepared_copy) -> None:
    file = prepared_copy / "manifest.json"
    content = file.read_text()
    for text, reason in (
        (content[:-30], "is damaged"),
        ("[]", "is damaged"),
        (json.dumps({**json.loads(content), "row_tokens": 65}), "does not match its own fingerprint"),
        (json.dumps({**json.loads(content), "unknown": 1}), "is damaged"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=f"{file} {reason}"):
            read_manifest(file)
    file.unlink()
    with pytest.raises(DataError, match=f"{file} is missing; data.path must be a folder"):
        read_manifest(file)


def test_a_split_without_rows_is_refused_with_those_there_are(prepared) -> None:
    manifest = read_manifest(prepared / "manifest.json")
    with pytest.raises(DataError, match="no rows in its test split"):
        replace(manifest, splits={"train": manifest.splits["train"]}).sources("test")


def test_a_vocabulary_larger_than_the_models_names_both_and_a_size_that_fits(prepared) -> None:
    manifest = read_manifest(prepared / "manifest.json")
    check_vocabulary(manifest, 512)
    message = r"model\.vocab_size=511 must be at least the tokenizer's vocab_size=512; use model\.vocab_size=512"
    with pytest.raises(ValueError, match=message):
        check_vocabulary(manifest, 511)


def test_other_row_tokens_than_the_rows_are_refused(prepared) -> None:
    with pytest.raises(ValueError, match=r"data\.row_tokens=32 must equal row_tokens=64"):
        check_row_tokens(read_manifest(prepared / "manifest.json"), 32)


def test_another_tokenizer_than_the_shards_is_refused_by_hash(prepared) -> None:
    manifest = read_manifest(prepared / "manifest.json")
    check_tokenizer(manifest, load_tokenizer(prepared), name="its own")
    other = Tokenizer(train_tokenizer([generate_text(seed) for seed in range(9)], vocab_size=320), name="other")
    with pytest.raises(DataError, match=f"other.model .*{other.sha256[:12]}.* is not the tokenizer of the shards"):
        check_tokenizer(manifest, other, name="other.model")
