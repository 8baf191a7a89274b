"""Both input formats as they lie on disk, whole or damaged."""

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from data_pipeline.config import PrepareConfig
from data_pipeline.errors import DataError
from data_pipeline.sources import Document, InputFile, list_input_files, read_documents

RECORDS: list[dict[str, Any]] = [
    {"text": "a page of the web", "meta": {"redpajama_set_name": "RedPajamaCommonCrawl"}},
    {"text": "a book\nof two lines", "meta": json.dumps({"redpajama_set_name": "RedPajamaBook"})},
    {"text": "", "meta": {"redpajama_set_name": "RedPajamaC4"}},
    {"text": "no source of its own", "meta": {}},
]


def config_for(root: Path, **keys: Any) -> PrepareConfig:
    return PrepareConfig(output="unused", inputs={"web": str(root)}, **keys)


def read_all(config: PrepareConfig) -> list[Document]:
    return [document for file in list_input_files(config) for document in read_documents(file, config)]


def compress(lines: list[bytes], *, with_size: bool) -> bytes:
    compressor = zstandard.ZstdCompressor(write_content_size=with_size)
    if with_size:
        return compressor.compress(b"".join(lines))
    stream = compressor.compressobj()
    return stream.compress(b"".join(lines)) + stream.flush()


def write_slimpajama(root: Path, *, frames: int, with_size: bool) -> Path:
    lines = [json.dumps(record).encode() + b"\n" for record in RECORDS]
    file = root / "train" / "chunk1" / "example_train_0.jsonl.zst"
    file.parent.mkdir(parents=True)
    cut = [lines] if frames == 1 else [[line] for line in lines]
    file.write_bytes(b"".join(compress(part, with_size=with_size) for part in cut))
    return file


@pytest.mark.parametrize("with_size", [True, False])
@pytest.mark.parametrize("frames", [1, 4])
def test_all_frames_of_a_slimpajama_file_are_read_with_or_without_sizes(tmp_path, frames, with_size) -> None:
    write_slimpajama(tmp_path, frames=frames, with_size=with_size)
    documents = read_all(config_for(tmp_path, format="slimpajama"))
    assert [(document.text, document.source) for document in documents] == [
        ("a page of the web", "RedPajamaCommonCrawl"),
        ("a book\nof two lines", "RedPajamaBook"),
        ("no source of its own", "web"),
    ]


@pytest.mark.parametrize("frames", [1, 4])
def test_a_cut_off_zst_file_is_named_instead_of_ending_early(tmp_path, frames) -> None:
    file = write_slimpajama(tmp_path, frames=frames, with_size=False)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DataError, match=rf"{file} ends in the middle of a zstandard frame"):
        read_all(config_for(tmp_path, format="slimpajama"))


def test_a_damaged_zst_file_is_named(tmp_path) -> None:
    file = write_slimpajama(tmp_path, frames=1, with_size=True)
    file.write_bytes(b"\x00" * 10 + file.read_bytes()[10:])
    with pytest.raises(DataError, match=f"{file} is damaged"):
        read_all(config_for(tmp_path, format="slimpajama"))


@pytest.mark.parametrize("line", [b"{broken", b'{"body": "x"}', b'{"text": 3}', b"[]", b"\xff\xfe"])
def test_a_record_that_cannot_be_read_is_named_with_its_line(tmp_path, line) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl line 2 is not a record"):
        read_all(config_for(tmp_path, format="slimpajama"))


@pytest.mark.parametrize(
    ("text_document", "expected"),
    [
        ("file", ["one\ntwo\n\n\nthree\n"]),
        ("paragraph", ["one\ntwo", "three"]),
        ("line", ["one", "two", "three"]),
    ],
)
def test_plain_text_is_cut_into_documents_as_configured(tmp_path, text_document, expected) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.txt").write_text("one\ntwo\n\n\nthree\n")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    documents = read_all(config_for(tmp_path, text_document=text_document))
    assert [document.text for document in documents] == expected
    assert {document.source for document in documents} == {"web"}


def test_text_that_is_not_utf8_is_named_with_its_byte(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 at byte 3"):
        read_all(config_for(tmp_path))


def test_the_hash_of_the_text_alone_decides_the_split(tmp_path) -> None:
    texts = [f"document number {index}" for index in range(2000)]
    for name, order in (("a", texts), ("b", texts[::-1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("\n".join(order))
    keys: dict[str, Any] = {"text_document": "line", "validation_fraction": 0.1, "test_fraction": 0.2}
    one, other = (read_all(config_for(tmp_path / name, **keys)) for name in ("a", "b"))
    assert {document.text: document.split for document in one} == {document.text: document.split for document in other}
    counts = [sum(document.split == split for document in one) for split in ("validation", "test", "train")]
    # A binomial count of 2,000 draws stays within five standard deviations of its mean.
    assert all(
        abs(count - 2000 * p) < 5 * (2000 * p * (1 - p)) ** 0.5
        for count, p in zip(counts, (0.1, 0.2, 0.7), strict=True)
    )


def test_slimpajamas_own_folders_are_its_splits_when_asked_for(tmp_path) -> None:
    for split in ("train", "validation", "test"):
        folder = tmp_path / split / "chunk1"
        folder.mkdir(parents=True)
        (folder / "x.jsonl").write_text(json.dumps({"text": split}))
    documents = read_all(config_for(tmp_path, format="slimpajama", split_by="folder"))
    assert sorted((document.text, document.split) for document in documents) == [
        (split, split) for split in ("test", "train", "validation")
    ]
    (tmp_path / "extra.jsonl").write_text(json.dumps({"text": "where?"}))
    with pytest.raises(ValueError, match="split_by=folder must find train, validation or test"):
        read_all(config_for(tmp_path, format="slimpajama", split_by="folder"))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "inputs={} must name at least one"),
        ({"web": "/nonexistent"}, "inputs.web=/nonexistent must exist and hold files matching"),
        ({"a/b": "/tmp"}, "inputs.a/b must be named with letters"),
    ],
)
def test_inputs_that_cannot_be_are_refused_by_name(inputs, message) -> None:
    with pytest.raises(ValueError, match=message):
        list_input_files(PrepareConfig(output="unused", inputs=inputs))


def test_a_file_given_directly_is_read_whatever_its_name(tmp_path) -> None:
    (tmp_path / "README").write_text("hello")
    file = list_input_files(config_for(tmp_path / "README"))[0]
    assert file == InputFile(path=str(tmp_path / "README"), name="web/README", source="web", bytes=5)
