"""Preparation: nothing lost, nothing done twice, killed or not, in any number of processes."""

import hashlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard
from sentencepiece import SentencePieceTrainer

from data_pipeline.config import PrepareConfig
from data_pipeline.dataset import ShardCache
from data_pipeline.errors import DataError
from data_pipeline.manifest import SPLITS, Manifest, read_manifest
from data_pipeline.packing import split_documents
from data_pipeline.preflight import open_prepared_data, verify_folder
from data_pipeline.prepare import group_files, lock_folder, run_prepare, summarize
from data_pipeline.sources import InputFile, list_input_files, read_documents
from data_pipeline.synthetic import generate_text, write_synthetic_dataset
from data_pipeline.tokenizer import load_tokenizer

SETS = ("RedPajamaC4", "RedPajamaBook", "RedPajamaArXiv")


def write_slimpajama(root: Path, *, files: int, documents: int) -> Path:
    """Write files of several frames, three sources, meta as an object or a string."""
    for number in range(files):
        file = root / "train" / f"chunk{number % 2 + 1}" / f"example_train_{number}.jsonl.zst"
        file.parent.mkdir(parents=True, exist_ok=True)
        frames: list[bytes] = []
        for index in range(documents):
            meta: Any = {"redpajama_set_name": SETS[index % 3]}
            record = {"text": generate_text(1000 * number + index), "meta": json.dumps(meta) if index % 2 else meta}
            frames.append(zstandard.compress(json.dumps(record).encode() + b"\n"))
        file.write_bytes(b"".join(frames))
    return root


def make_config(root: Path, output: Path, **keys: Any) -> PrepareConfig:
    keys = {"vocab_size": 512, "row_tokens": 32, "validation_fraction": 0.1, "test_fraction": 0.1, **keys}
    return PrepareConfig(
        output=str(output),
        inputs={"slimpajama": str(root)},
        format="slimpajama",
        part_mib=0.002,
        shard_mib=0.005,
        **keys,
    )


def prepare(config: PrepareConfig) -> tuple[Manifest, list[str]]:
    lines: list[str] = []
    return run_prepare(config, lines.append), lines


def hash_folder(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def slimpajama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_slimpajama(tmp_path_factory.mktemp("raw") / "SlimPajama", files=8, documents=24)


@pytest.fixture(scope="module")
def uninterrupted(slimpajama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "data"
    prepare(make_config(slimpajama, output, workers=1))
    return output


def read_back(folder: Path, split: Any, cache: Path) -> Counter[tuple[str, str]]:
    """Return (source, text) of every document of a split, put together from its rows."""
    data = open_prepared_data(str(folder), split, cache_dir=cache, verify="hashes", timeout_s=30)
    tokenizer = load_tokenizer(folder)
    shards = ShardCache(data, split, cache_limit_bytes=0, timeout_s=30)
    found: Counter[tuple[str, str]] = Counter()
    first = 0
    for source, held in data.manifest.sources(split).items():
        pieces: list[int] = []
        for row in range(first, first + held.rows):
            for part in split_documents(shards.read_row(row)[1 if pieces else 0 :], tokenizer.bos_id):
                if not pieces and part[0] != tokenizer.bos_id:
                    continue  # the last token of the row before, which ended a document
                pieces.extend(int(piece) for piece in part)
                if pieces[-1] == tokenizer.eos_id:
                    found[source, tokenizer.decode(pieces)] += 1
                    pieces = []
        first += held.rows
        assert not pieces
    return found


def test_every_document_is_read_back_from_the_rows_once_in_its_source_and_split(
    slimpajama, uninterrupted, tmp_path
) -> None:
    config = make_config(slimpajama, uninterrupted)
    documents = [document for file in list_input_files(config) for document in read_documents(file, config)]
    for split in SPLITS:
        expected = Counter((document.source, document.text) for document in documents if document.split == split)
        assert read_back(uninterrupted, split, tmp_path / "cache") == expected


def test_the_manifest_counts_documents_tokens_and_bytes(slimpajama, uninterrupted) -> None:
    config = make_config(slimpajama, uninterrupted)
    tokenizer = load_tokenizer(uninterrupted)
    manifest = read_manifest(uninterrupted / "manifest.json")
    documents = [document for file in list_input_files(config) for document in read_documents(file, config)]
    texts = [document.text for document in documents if (document.split, document.source) == ("train", SETS[0])]
    held = manifest.splits["train"][SETS[0]]
    assert held.documents == len(texts)
    assert held.text_bytes == sum(len(text.encode()) for text in texts)
    assert held.tokens == sum(len(tokenizer.encode(text)) + 2 for text in texts)
    assert held.rows == sum(shard.rows for shard in held.shards) and len(held.shards) > 1
    assert manifest.tokenizer_sha256 == hashlib.sha256((uninterrupted / "tokenizer.model").read_bytes()).hexdigest()
    assert f"{held.text_bytes / held.tokens:.2f}" in summarize(manifest)


def test_shards_are_ordinary_mds_that_streaming_reads_by_itself(uninterrupted, tmp_path) -> None:
    from streaming import StreamingDataset

    manifest = read_manifest(uninterrupted / "manifest.json")
    remote, local = str(uninterrupted / "train" / SETS[0]), str(tmp_path / "local")
    stock: Any = StreamingDataset(remote=remote, local=local, batch_size=1, validate_hash="sha256")
    held = manifest.splits["train"][SETS[0]]
    assert len(stock) == held.rows
    assert all(stock[row]["tokens"].shape == (33,) for row in range(held.rows))


def test_several_processes_write_the_same_bytes_as_one(slimpajama, uninterrupted, tmp_path) -> None:
    prepare(make_config(slimpajama, tmp_path / "data", workers=2))
    assert hash_folder(tmp_path / "data") == hash_folder(uninterrupted)


def test_killed_in_the_middle_it_goes_on_and_writes_the_same_bytes(slimpajama, uninterrupted, tmp_path) -> None:
    output = tmp_path / "data"
    command = f"""
import time, data_pipeline.prepare as prepare
from tests.data_pipeline.test_prepare import make_config, Path
write, done = prepare.write_part, []
def slow(documents, folder, *rest):
    write(([time.sleep(0.02), document][1] for document in documents), folder, *rest)
prepare.write_part = slow
prepare.run_prepare(make_config(Path({str(slimpajama)!r}), Path({str(output)!r}), workers=2), print)
"""
    process = subprocess.Popen([sys.executable, "-c", command], start_new_session=True, cwd=Path(__file__).parents[2])
    wait_for(lambda: len(list(output.glob("parts/part_*"))) >= 3 and list(output.glob("parts/.part_*")))
    os.kill(process.pid, signal.SIGKILL)  # the parent alone: its workers must not outlive it
    process.wait()
    done = {file: file.stat().st_ino for file in output.glob("parts/part_*/part.json")}
    total = len(group_files(list_input_files(make_config(slimpajama, output)), 0.002 * 2**20))
    assert 3 <= len(done) < total and not (output / "manifest.json").exists()

    _, lines = prepare(make_config(slimpajama, output, workers=2))
    assert lines[0] == f"resuming: {len(done)} of {total} parts are done already"
    assert sum(line.startswith("part ") for line in lines) == total - len(done)
    assert hash_folder(output) == hash_folder(uninterrupted)


def wait_for(condition: Any, timeout_s: float = 90.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        time.sleep(0.01)


@pytest.mark.parametrize("moves", [0, 1, 7])
def test_killed_while_parts_are_joined_it_writes_the_same_bytes(
    slimpajama, uninterrupted, tmp_path, monkeypatch, moves
) -> None:
    renamed: list[Path] = []
    rename = Path.rename

    def die_after_moves(self: Path, target: Path) -> Path:
        if self.name.startswith("shard."):
            renamed.append(self)
            if len(renamed) > moves:
                raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", die_after_moves)
    with pytest.raises(KeyboardInterrupt):
        prepare(make_config(slimpajama, tmp_path / "data", workers=1))
    monkeypatch.undo()
    prepare(make_config(slimpajama, tmp_path / "data", workers=1))
    assert hash_folder(tmp_path / "data") == hash_folder(uninterrupted)


def test_a_second_run_does_nothing(slimpajama, uninterrupted) -> None:
    before = {file: file.stat().st_mtime_ns for file in uninterrupted.rglob("*") if file.name != ".lock"}
    manifest, lines = prepare(make_config(slimpajama, uninterrupted, workers=2))
    assert lines == [f"{uninterrupted} is prepared already; nothing to do"]
    assert before == {file: file.stat().st_mtime_ns for file in uninterrupted.rglob("*") if file.name != ".lock"}
    assert manifest == read_manifest(uninterrupted / "manifest.json")


def test_other_settings_in_the_same_folder_are_refused_by_name(slimpajama, uninterrupted, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"row_tokens=64 must equal row_tokens=32, .*choose another output"):
        prepare(make_config(slimpajama, uninterrupted, row_tokens=64))
    less = write_slimpajama(tmp_path / "less", files=1, documents=3)
    with pytest.raises(ValueError, match=r"inputs=1 files .* must equal inputs=8 files"):
        prepare(make_config(less, uninterrupted))


def test_a_folder_of_something_else_is_left_alone(slimpajama, tmp_path) -> None:
    (tmp_path / "thesis.doc").write_text("years of work")
    with pytest.raises(ValueError, match=r"must be empty or begun by `prism prepare`, but holds thesis\.doc"):
        prepare(make_config(slimpajama, tmp_path))


def test_a_second_prepare_at_the_same_time_is_refused(slimpajama, tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    held, ended = context.Event(), context.Event()
    process = context.Process(target=hold_folder, args=(tmp_path, held, ended))
    process.start()
    held.wait(20)
    with pytest.raises(ValueError, match="must not be in use by another `prism prepare`"):
        prepare(make_config(slimpajama, tmp_path))
    ended.set()
    process.join()


def hold_folder(folder: Path, held: Any, ended: Any) -> None:
    with lock_folder(folder):
        held.set()
        ended.wait(20)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_input_file_ends_the_run_with_its_name(tmp_path, monkeypatch, workers) -> None:
    monkeypatch.setattr("data_pipeline.prepare.sample_texts", lambda config, files: [])  # it would meet the file first
    root = write_slimpajama(tmp_path / "raw", files=4, documents=6)
    file = sorted(root.rglob("*.zst"))[2]
    file.write_bytes(file.read_bytes()[:-4])
    tokenizer = tmp_path / "given.model"
    tokenizer.write_bytes(train_given())
    with pytest.raises(DataError, match=f"{file} ends in the middle"):
        prepare(make_config(root, tmp_path / "data", workers=workers, tokenizer=str(tokenizer)))


def train_given() -> bytes:
    from data_pipeline.tokenizer import train_tokenizer

    return train_tokenizer([generate_text(seed) for seed in range(40)], vocab_size=400)


def test_a_given_tokenizer_is_taken_and_copied(slimpajama, tmp_path) -> None:
    given = tmp_path / "given.model"
    given.write_bytes(train_given())
    manifest, _ = prepare(make_config(slimpajama, tmp_path / "data", tokenizer=str(given)))
    assert manifest.vocab_size == 400
    assert (tmp_path / "data" / "tokenizer.model").read_bytes() == given.read_bytes()


def train_unfit(**settings: Any) -> bytes:
    """A model trained with SentencePiece's own defaults where `settings` do not say otherwise."""
    model = io.BytesIO()
    sentences = [line for seed in range(40) for line in generate_text(seed).splitlines()]
    keys = {"model_type": "bpe", "vocab_size": 400, "minloglevel": 2, **settings}
    SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, **keys)
    return model.getvalue()


EXACT = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({}, "comes back as"),
        (EXACT, "instead of"),  # the dummy prefix: a space more than the text has
        ({**EXACT, "add_dummy_prefix": False, "byte_fallback": False}, "comes back as"),
        ({**EXACT, "add_dummy_prefix": False, "normalization_rule_name": "nmt_nfkc"}, "comes back as"),
    ],
)
def test_a_given_tokenizer_that_changes_text_is_refused_before_anything_is_written(
    slimpajama, tmp_path, settings, difference
) -> None:
    given = tmp_path / "given.model"
    given.write_bytes(train_unfit(**settings))
    message = f"tokenizer={given} must stand for its text byte by byte.*{difference}.*leave tokenizer out to train one"
    with pytest.raises(ValueError, match=message):
        prepare(make_config(slimpajama, tmp_path / "data", tokenizer=str(given)))
    assert not list((tmp_path / "data").rglob("*.mds*"))


def test_a_document_whose_tokens_stand_for_other_text_is_refused_when_it_is_met(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("\n".join([*(generate_text(seed) for seed in range(4)), "rare: \u6771"]))
    given = tmp_path / "given.model"
    given.write_bytes(train_unfit(**{**EXACT, "add_dummy_prefix": False, "byte_fallback": False}))
    monkeypatch.setattr("data_pipeline.prepare.check_gives_text_back", lambda tokenizer, texts, name: None)
    keys: dict[str, Any] = {"text_document": "line", "row_tokens": 8, "workers": 1, "tokenizer": str(given)}
    with pytest.raises(DataError, match=r"changes the document that begins 'rare: \u6771': .* comes back as"):
        prepare(PrepareConfig(output=str(tmp_path / "data"), inputs={"a": str(tmp_path / "a.txt")}, **keys))


def test_sentencepieces_own_mark_in_a_text_is_read_as_the_space_it_stands_for(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(f"{generate_text(seed)} a\u2581b" for seed in range(40)))
    keys: dict[str, Any] = {"text_document": "line", "row_tokens": 8, "workers": 1, "vocab_size": 400}
    manifest, _ = prepare(PrepareConfig(output=str(tmp_path / "data"), inputs={"a": str(tmp_path / "a.txt")}, **keys))
    assert manifest.splits["train"]["a"].documents > 30


def test_uncompressed_shards_are_written_and_verified_too(slimpajama, tmp_path) -> None:
    prepare(make_config(slimpajama, tmp_path / "data", compression=""))
    assert verify_folder(tmp_path / "data") > 3
    assert read_back(tmp_path / "data", "validation", tmp_path / "cache")


def test_a_large_vocabulary_is_stored_in_four_bytes(slimpajama, uninterrupted, tmp_path, monkeypatch) -> None:
    import data_pipeline.prepare
    import data_pipeline.shards

    for module in (data_pipeline.prepare, data_pipeline.shards):
        monkeypatch.setattr(module, "row_dtype", lambda vocab_size: "uint32")
    manifest, _ = prepare(make_config(slimpajama, tmp_path / "data", workers=1))
    assert manifest.dtype == "uint32"
    expected = read_back(uninterrupted, "test", tmp_path / "cache-a")
    assert read_back(tmp_path / "data", "test", tmp_path / "cache-b") == expected


def test_parts_hold_consecutive_files_up_to_their_size() -> None:
    files = [InputFile(path="", name=str(size), source="a", bytes=size) for size in (5, 5, 20, 1, 1)]
    assert [[file.bytes for file in part] for part in group_files(files, 10)] == [[5, 5], [20], [1, 1]]


def test_the_synthetic_folder_is_the_same_each_time(tmp_path) -> None:
    one, other = (write_synthetic_dataset(tmp_path / name, documents=40, vocab_size=320) for name in ("a", "b"))
    assert hash_folder(one) == hash_folder(other)
    manifest = read_manifest(one / "manifest.json")
    assert all(set(manifest.sources(split)) == {"alpha", "beta"} for split in SPLITS) and manifest.vocab_size == 320
