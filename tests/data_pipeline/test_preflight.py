"""What is wrong when a run starts is said before its first row: each kind of damage, with the file's name."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import DataError
from data_pipeline.manifest import read_manifest
from data_pipeline.preflight import open_prepared_data, verify_folder
from data_pipeline.synthetic import generate_text
from data_pipeline.tokenizer import train_tokenizer
from tests.data_pipeline.disks import full_disk, read_only

SHARD = "train/alpha/shard.000002.mds.zstd"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def open_data(folder: Path, cache: Path, **keys: Any) -> Any:
    keys = {"split": "train", "verify": "auto", "timeout_s": 20.0, **keys}
    return open_prepared_data(str(folder), cache_dir=cache, **keys)


DAMAGE = [
    (SHARD, Path.unlink, f"{SHARD} is missing"),
    (SHARD, truncate, f"{SHARD} has [0-9]+ bytes instead of [0-9]+"),
    (SHARD, flip, f"{SHARD} does not match its sha256"),
    ("train/beta/index.json", Path.unlink, "train/beta/index.json is missing"),
    ("train/beta/index.json", flip, "train/beta/index.json does not match its sha256"),
    ("tokenizer.model", Path.unlink, "tokenizer.model cannot be read"),
    ("manifest.json", Path.unlink, "manifest.json is missing"),
    ("manifest.json", truncate, "manifest.json is damaged"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE)
def test_damage_is_named_at_the_start_and_by_verify(prepared_copy, tmp_path, name, damage, message) -> None:
    open_data(prepared_copy, tmp_path / "cache")
    assert verify_folder(prepared_copy) > 10
    damage(prepared_copy / name)
    with pytest.raises(DataError, match=f"{prepared_copy}/{message}"):
        open_data(prepared_copy, tmp_path / "cache")
    with pytest.raises(DataError, match=message):
        verify_folder(prepared_copy)


def test_verify_names_every_bad_file_at_once(prepared_copy) -> None:
    flip(prepared_copy / SHARD)
    (prepared_copy / "test/beta/index.json").unlink()
    with pytest.raises(DataError) as raised:
        verify_folder(prepared_copy)
    assert SHARD in str(raised.value) and "test/beta/index.json is missing" in str(raised.value)


def test_sizes_alone_are_checked_where_hashing_was_declined(prepared_copy, tmp_path) -> None:
    flip(prepared_copy / SHARD)
    open_data(prepared_copy, tmp_path / "cache", verify="sizes")
    truncate(prepared_copy / SHARD)
    with pytest.raises(DataError, match=SHARD):
        open_data(prepared_copy, tmp_path / "cache", verify="sizes")


def test_a_tokenizer_of_another_data_set_is_refused(prepared_copy, tmp_path) -> None:
    (prepared_copy / "tokenizer.model").write_bytes(
        train_tokenizer([generate_text(seed) for seed in range(9)], vocab_size=320)
    )
    with pytest.raises(DataError, match=r"tokenizer\.model \(sha256 .*is not the tokenizer of the shards"):
        open_data(prepared_copy, tmp_path / "cache")


def test_a_damaged_copy_of_an_index_in_the_cache_is_fetched_again(prepared, tmp_path) -> None:
    data = open_data(prepared, tmp_path)
    index = data.cache / "train" / "alpha" / "index.json"
    whole = index.read_bytes()
    flip(index)
    open_data(prepared, tmp_path)
    assert index.read_bytes() == whole


def test_another_data_set_in_the_same_cache_folder_gets_files_of_its_own(prepared, tmp_path) -> None:
    other = shutil.copytree(prepared, tmp_path / "other")
    manifest = read_manifest(other / "manifest.json")
    assert open_data(other, tmp_path / "cache").cache == open_data(prepared, tmp_path / "cache").cache
    assert open_data(prepared, tmp_path / "cache").cache.name == manifest.fingerprint[:16]


def test_a_cache_disk_without_room_is_named_at_the_start(prepared, tmp_path) -> None:
    with (
        full_disk(tmp_path / "disk", free_bytes=4096) as disk,
        pytest.raises(DataError, match=f"the cache folder {disk}"),
    ):
        open_data(prepared, disk)


def test_a_read_only_cache_disk_is_named_at_the_start(prepared, tmp_path) -> None:
    with (
        full_disk(tmp_path / "disk", free_bytes=1 << 22) as disk,
        read_only(disk),
        pytest.raises(DataError, match=f"the cache folder {disk} cannot be written"),
    ):
        open_data(prepared, disk)


@pytest.mark.parametrize("path", ["/nonexistent/data", "s3x://bucket/data"])
def test_a_place_that_is_not_there_is_named(tmp_path, path) -> None:
    with pytest.raises(DataError, match=f"{path}/manifest.json"):
        open_data(Path(path) if path.startswith("/") else path, tmp_path)


def test_an_empty_path_names_the_key_to_set(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"data\.path= must be a folder written by `prism prepare`"):
        open_data("", tmp_path)  # type: ignore[arg-type]
