import json
from pathlib import Path

import pytest

from launcher import generate_batch
from launcher.__main__ import EXIT_USAGE, main
from launcher.continuation import Continuation, Continuer
from launcher.generate_batch import WINDOW_BATCHES, plan_batches
from tests.launcher.trained_folders import write_trained_run

PROMPTS = ["the cat", "", "a dog ran to the house", "b", "the sun", "a tree and a tree", "x"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained_run(tmp_path_factory.mktemp("runs") / "small")


def write_prompts(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "id": place}) + "\n" for place, text in enumerate(PROMPTS)))
    return path


def build_arguments(run_dir: Path, source: Path, output: Path, *options: str) -> list[str]:
    files = ["--prompts", str(source), "--output", str(output), "--max-new-tokens", "6", "--quiet"]
    return ["generate", str(run_dir), *files, *options]


def read_output(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("options", [["--temperature", "0"], ["--seed", "5"]], ids=["greedy", "sampled"])
def test_continuations_come_in_order_whatever_the_batch_size(run_dir: Path, tmp_path: Path, options: list[str]) -> None:
    source, outputs = write_prompts(tmp_path), []
    for size in ("1", "3", "16"):
        outputs.append(tmp_path / f"out_{size}.jsonl")
        assert main(build_arguments(run_dir, source, outputs[-1], "--batch-size", size, *options)) == 0
    records = read_output(outputs[0])
    assert [(record["prompt"], record["id"]) for record in records] == [(text, i) for i, text in enumerate(PROMPTS)]
    assert read_output(outputs[1]) == records == read_output(outputs[2])
    assert len({record["text"] for record in records}) > 3
    for record in records:
        assert list(record) == ["prompt", "id", "text", "num_new_tokens", "finish_reason"]
        assert (record["finish_reason"] == "length") == (record["num_new_tokens"] == 6)


def test_prompt_of_a_file_is_continued_as_alone_with_its_own_seed(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    source.write_bytes(b"the cat\n\na dog\r\nlast")
    assert main(build_arguments(run_dir, source, output, "--seed", "5")) == 0
    records = read_output(output)
    assert [record["prompt"] for record in records] == ["the cat", "", "a dog", "last"]
    capsys.readouterr()
    alone = ["--prompt", "a dog", "--seed", "7", "--max-new-tokens", "6", "--quiet"]
    assert main(["generate", str(run_dir), *alone]) == 0
    assert capsys.readouterr().out == "a dog" + records[2]["text"] + "\n"


def test_stop_string_ends_a_text_and_is_its_reason(run_dir: Path, tmp_path: Path) -> None:
    source, free, stopped = write_prompts(tmp_path), tmp_path / "free.jsonl", tmp_path / "stopped.jsonl"
    assert main(build_arguments(run_dir, source, free)) == 0
    stop = read_output(free)[0]["text"][2:4]
    assert main(build_arguments(run_dir, source, stopped, "--stop", stop)) == 0
    for before, after in zip(read_output(free), read_output(stopped), strict=True):
        assert after["text"] == before["text"].split(stop)[0]
        assert after["finish_reason"] == ("stop" if stop in before["text"] else before["finish_reason"])


class CutOff(Exception):
    pass


@pytest.mark.parametrize("torn", ["", '{"prompt": "the s'])
def test_file_that_was_cut_off_is_gone_on_with(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], torn: str
) -> None:
    monkeypatch.setattr(generate_batch, "WINDOW_BATCHES", 1)
    source, whole, cut = write_prompts(tmp_path), tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert main(build_arguments(run_dir, source, whole, "--batch-size", "2")) == 0
    continue_batch, batches = Continuer.continue_batch, []

    def note(self, prompts, seeds, *, on_text=None):
        batches.append(prompts)
        if len(batches) == 3:
            raise CutOff
        return continue_batch(self, prompts, seeds, on_text=on_text)

    monkeypatch.setattr(Continuer, "continue_batch", note)
    with pytest.raises(CutOff):
        main(build_arguments(run_dir, source, cut, "--batch-size", "2"))
    assert cut.read_text().splitlines() == whole.read_text().splitlines()[:4]
    cut.write_text(cut.read_text() + torn)
    assert main(build_arguments(run_dir, source, cut, "--batch-size", "2")) == 0
    assert cut.read_bytes() == whole.read_bytes() and len(batches) == 5
    assert f"--output={cut} holds 4 of 7 continuations; going on after them\n" in capsys.readouterr().err
    assert main(build_arguments(run_dir, source, cut, "--batch-size", "2")) == 0
    assert cut.read_bytes() == whole.read_bytes() and len(batches) == 5
    assert f"--output={cut} holds 7 of 7 continuations; nothing is left to do\n" in capsys.readouterr().err


def test_file_of_other_work_is_not_gone_on_with(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output, other = write_prompts(tmp_path), tmp_path / "out.jsonl", tmp_path / "other.txt"
    other.write_text("another prompt\n")
    assert main(build_arguments(run_dir, source, output)) == 0
    written = output.read_bytes()
    for arguments, words in (
        (build_arguments(run_dir, source, output, "--seed", "1"), "seed=1 must be 0, with which --output="),
        (build_arguments(run_dir, source, output, "--stop", "x"), "stops=['x'] must be [], with which --output="),
        (build_arguments(run_dir, other, output), "must not have more lines than --prompts, 1"),
    ):
        assert main(arguments) == EXIT_USAGE
        error = capsys.readouterr().err
        assert words in error and error.endswith("give another file, or remove it\n") and error.count("\n") == 1
    other.write_text("another prompt\n" * 7)
    assert main(build_arguments(run_dir, other, output)) == EXIT_USAGE
    assert "line 1 must continue that line of --prompts" in capsys.readouterr().err
    (tmp_path / "out.jsonl.settings.json").unlink()
    assert main(build_arguments(run_dir, source, output)) == EXIT_USAGE
    assert "must be new, or have out.jsonl.settings.json beside it" in capsys.readouterr().err
    assert output.read_bytes() == written


@pytest.mark.parametrize(
    "content", [b'{"seed": "\xe9"}', b"{", b"[]", b"[" * 100_000], ids=["bytes", "cut", "list", "deep"]
)
def test_settings_of_an_output_that_cannot_be_read_are_named(
    content: bytes, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write_prompts(tmp_path), tmp_path / "out.jsonl"
    output.write_text('{"prompt": "the cat", "id": 0, "text": "", "num_new_tokens": 0, "finish_reason": "stop"}\n')
    (tmp_path / "out.jsonl.settings.json").write_bytes(content)
    assert main(build_arguments(run_dir, source, output)) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"error: --output={output} must be new, or have beside it, in out.jsonl.settings.json, ")
    assert error.endswith("as JSON in UTF-8; give another file, or remove it\n") and error.count("\n") == 1


@pytest.mark.parametrize("reason", ["Is a directory", "Permission denied"])
def test_output_that_cannot_be_written_is_refused_before_the_weights_are_read(
    reason: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launcher.trained_run.load_model", None)
    source, output, open_file = write_prompts(tmp_path), tmp_path / "out.jsonl", Path.open

    def refuse(path: Path, *arguments, **options):
        if path == output:
            raise PermissionError(13, reason)
        return open_file(path, *arguments, **options)

    if reason == "Is a directory":
        (tmp_path / "out.jsonl.settings.json").mkdir()
    else:
        monkeypatch.setattr(Path, "open", refuse)
    assert main(build_arguments(run_dir, source, output)) == EXIT_USAGE
    rule = f"must be a file that can be written, with {output.name}.settings.json beside it ({reason})"
    assert capsys.readouterr().err == f"error: --output={output} {rule}; give another file\n"


WRONG = {
    "[1]": 'line 2 must be an object with a text "prompt"',
    "{": 'line 2 must be an object with a text "prompt"',
    '{"prompt": 3}': 'line 2 must be an object with a text "prompt"',
    '{"prompt": "\\ud800"}': 'line 2 must be an object with a text "prompt"',
    "": 'line 2 must be an object with a text "prompt"',
    '{"prompt": "a", "text": "b"}': "line 2 must not have the key text, which the output has; rename it",
}


@pytest.mark.parametrize("line", WRONG)
def test_line_that_is_no_prompt_is_named(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "a"}\n' + line + "\n")
    assert main(build_arguments(tmp_path / "no_run", source, tmp_path / "out.jsonl")) == EXIT_USAGE
    assert WRONG[line] in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_file_without_a_prompt_or_that_is_no_text_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "prompts.txt"
    source.write_bytes(content)
    assert main(build_arguments(tmp_path / "no_run", source, tmp_path / "out.jsonl")) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"error: --prompts={source} must ")


@pytest.mark.parametrize(("first", "batch_size"), [(0, 1), (0, 4), (37, 3), (99, 5)])
def test_batches_hold_every_place_once_and_prompts_of_like_length(first: int, batch_size: int) -> None:
    lengths = [(7 * place) % 31 for place in range(100)]
    batches = list(plan_batches(lengths, first=first, batch_size=batch_size))
    assert sorted(place for batch in batches for place in batch) == list(range(first, 100))
    window = WINDOW_BATCHES * batch_size
    for number, batch in enumerate(batches):
        assert len(batch) == batch_size or number == len(batches) - 1
        begin = first + number // WINDOW_BATCHES * window
        assert all(begin <= place < begin + window for place in batch)
        assert [lengths[place] for place in batch] == sorted((lengths[place] for place in batch), reverse=True)


def test_no_line_is_written_before_those_above_it(tmp_path: Path) -> None:
    output, seen = tmp_path / "out.jsonl", []

    def continue_batch(prompts: list[str], places: list[int]) -> list[Continuation]:
        seen.append(output.read_text().count("\n"))
        return [Continuation(text=f"{prompt}!", num_new_tokens=1, finish_reason="stop") for prompt in prompts]

    records = [{"prompt": str(place)} for place in range(6)]
    generate_batch.continue_file(
        records, [0, 9, 1, 8, 2, 7], output, first=0, batch_size=2, continue_batch=continue_batch
    )
    assert seen == [0, 0, 0] and [record["text"] for record in read_output(output)] == [
        f"{place}!" for place in range(6)
    ]
