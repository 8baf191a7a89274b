import io
import random
import signal
import sys
from pathlib import Path

import pytest

from data_pipeline.synthetic import generate_text
from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from launcher.__main__ import main
from launcher.continuation import Continuer
from launcher.generate_stream import WINDOW_TOKENS, PieceDecoder, TextStream, count_overlap
from tests.launcher.trained_folders import write_trained_run

TEXT = "naïve café 東京 🙂🙂 x\n\n  two  spaces"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer([generate_text(seed) for seed in range(40)], vocab_size=400), name="small")


def byte_ids(tokenizer: Tokenizer, content: bytes) -> list[int]:
    return [tokenizer.processor.piece_to_id(f"<0x{byte:02X}>") for byte in content]


def test_parts_of_random_tokens_add_up_to_the_text_of_all(tokenizer: Tokenizer) -> None:
    """Ordinary pieces between bytes of whole, cut and impossible characters, some of them longer than a window."""
    draw = random.Random(0)
    pool = [
        byte_ids(tokenizer, text)
        for text in ("é".encode(), "東".encode(), "🙂".encode(), b"\xe6\x9d", b"\xff", b"\x80")
    ]
    for _ in range(60):
        tokens: list[int] = []
        for _ in range(draw.randrange(1, 3 * WINDOW_TOKENS)):
            tokens += draw.choice(pool) if draw.random() < 0.5 else [draw.randrange(tokenizer.vocab_size)]
        decoder = PieceDecoder(tokenizer.decode)
        parts = [decoder.add([token]) for token in tokens]
        assert "".join(parts) + decoder.finish() == tokenizer.decode(tokens)


def test_character_of_several_bytes_is_given_whole(tokenizer: Tokenizer) -> None:
    decoder = PieceDecoder(tokenizer.decode)
    tokens = tokenizer.encode(TEXT)
    assert len(tokens) > len(TEXT)
    parts = [decoder.add([token]) for token in tokens]
    assert "".join(parts) == TEXT and not any("\ufffd" in part for part in parts)
    assert [part for part in parts if part in "é東京🙂" and part] == ["é", "東", "京", "🙂", "🙂"]


def test_tokens_before_the_window_are_not_decoded_again(tokenizer: Tokenizer) -> None:
    lengths: list[int] = []

    def decode(tokens: list[int]) -> str:
        lengths.append(len(tokens))
        return tokenizer.decode(tokens)

    decoder = PieceDecoder(decode)
    for token in tokenizer.encode(generate_text(3)):
        decoder.add([token])
    assert max(lengths) == WINDOW_TOKENS + 1 and len(lengths) > 2 * WINDOW_TOKENS


@pytest.mark.parametrize("stops", [["###"], ["wx", "#"], ["k: ##", "zzz"]])
def test_text_ends_before_the_stop_string_and_nothing_of_it_is_shown(tokenizer: Tokenizer, stops: list[str]) -> None:
    whole = "one ## two k: #### three wx four"
    end = min(place for place in map(whole.find, stops) if place >= 0)
    for chunk in (1, 3, 100):
        stream, tokens = TextStream(tokenizer.decode, stops), tokenizer.encode(whole)
        shown = ""
        for first in range(0, len(tokens), chunk):
            shown += stream.add(tokens[first : first + chunk])
            assert whole[:end].startswith(shown)
        assert stream.finish() == "" and shown == stream.text == whole[:end] and stream.has_stopped


def test_beginning_of_a_stop_string_is_shown_once_it_turns_out_otherwise(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer.decode, ["#!#"])
    parts = [stream.add(tokenizer.encode(text)) for text in ("a#", "!", "!b #!")]
    assert parts == ["a", "", "#!!b "] and stream.finish() == "#!" and not stream.has_stopped


@pytest.mark.parametrize(
    ("text", "stop", "expected"), [("ab", "abc", 2), ("abc", "abc", 0), ("xaa", "aab", 2), ("", "a", 0)]
)
def test_overlap_is_the_longest_beginning_of_the_stop_string(text: str, stop: str, expected: int) -> None:
    assert count_overlap(text, stop) == expected


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained_run(tmp_path_factory.mktemp("runs") / "small")


def converse(run_dir: Path, lines: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["generate", str(run_dir), "--interactive", "--max-new-tokens", "8", *options])


def test_each_line_is_continued_until_an_empty_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converse(run_dir, "the cat\nthe dog\n\nnever\n", monkeypatch, "--seed", "4") == 0
    printed = capsys.readouterr()
    expected = ""
    for seed, prompt in enumerate(("the cat", "the dog"), 4):
        assert main(["generate", str(run_dir), "--prompt", prompt, "--max-new-tokens", "8", "--seed", str(seed)]) == 0
        expected += capsys.readouterr().out.removeprefix(prompt)
    assert printed.out == expected
    assert [line.count("tokens/s") for line in printed.err.splitlines()] == [2, 2]


def test_end_of_the_input_ends_the_conversation(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converse(run_dir, "the cat", monkeypatch, "--quiet") == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("\n") and printed.err == ""


def test_interrupt_ends_one_continuation_only(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real SIGINT while the first of two lines is being continued."""
    continue_batch, calls = Continuer.continue_batch, []

    def interrupt_first(self, prompts, seeds, *, on_text=None):
        def show(row: int, text: str) -> None:
            on_text(row, text)
            calls.append(prompts[0])
            if len(calls) == 2:
                signal.raise_signal(signal.SIGINT)

        return continue_batch(self, prompts, seeds, on_text=show)

    monkeypatch.setattr(Continuer, "continue_batch", interrupt_first)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit "ignore"
    try:
        assert converse(run_dir, "the cat\nthe dog\n", monkeypatch) == 0
    finally:
        signal.signal(signal.SIGINT, former)
    printed = capsys.readouterr()
    assert calls.count("the cat") == 2 < calls.count("the dog")
    assert printed.err.count("new: 8 tokens") == 1 and printed.out.count("\n") >= 2
