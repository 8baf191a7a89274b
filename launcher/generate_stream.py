"""Text of tokens as they come: never half a character, never part of a stop string; and continuations on a terminal."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from launcher.continuation import Continuer

Decode = Callable[[list[int]], str]

REPLACEMENT = "\ufffd"
MAX_CUT_BYTES = 3
"Bytes of a character of UTF-8 that may be there while its last is missing; each is decoded as one replacement."
WINDOW_TOKENS, KEPT_TOKENS = 32, 4


class PieceDecoder:
    """The text of a growing list of tokens; `add` and `finish` together give what decode gives for all of them.

    Tokens whose text is settled are forgotten, but for a few that decide how the next ones are read.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_given = 0

    def add(self, tokens: list[int]) -> str:
        """The text that no later token changes and that was not given before."""
        self._window += tokens
        text = self._decode(self._window)
        num_open = min(MAX_CUT_BYTES, len(text) - len(text.rstrip(REPLACEMENT)))
        given = self._give(text[: len(text) - num_open])
        if not num_open and len(self._window) > WINDOW_TOKENS:
            self._window = self._window[-KEPT_TOKENS:]
            self._num_given = len(self._decode(self._window))
        return given

    def finish(self) -> str:
        """The rest, with a replacement for each byte of a character that was never completed."""
        return self._give(self._decode(self._window))

    def _give(self, text: str) -> str:
        given = text[self._num_given :]
        self._num_given = max(self._num_given, len(text))
        return given


class TextStream:
    """A continuation's text up to the first stop string. What may be the beginning of one is held back."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._pieces, self._stops, self._held = PieceDecoder(decode), tuple(stops), ""
        self.text = ""
        self.has_stopped = False

    def add(self, tokens: list[int]) -> str:
        """The text that these tokens settle."""
        return self._take(self._pieces.add(tokens), is_last=False)

    def finish(self) -> str:
        """The rest of the text."""
        return self._take(self._pieces.finish(), is_last=True)

    def _take(self, new: str, *, is_last: bool) -> str:
        if self.has_stopped:
            return ""
        text = self._held + new
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        self.has_stopped = bool(places)
        num_held = 0 if is_last else max((count_overlap(text, stop) for stop in self._stops), default=0)
        end = min(places) if places else len(text) - num_held
        self._held = text[end:]
        self.text += text[:end]
        return text[:end]


def count_overlap(text: str, stop: str) -> int:
    """The most characters at the end of the text with which the stop string, not whole, begins."""
    return next((count for count in range(len(stop) - 1, 0, -1) if text.endswith(stop[:count])), 0)


def stream_text(continuer: "Continuer", prompt: str, seed: int, out: TextIO) -> str:
    """A prompt's continuation, written as it comes, and then a line's end."""

    def show(row: int, text: str) -> None:
        out.write(text)
        out.flush()

    (continuation,) = continuer.continue_batch([prompt], [seed], on_text=show)
    out.write("\n")
    out.flush()
    return continuation.text


def read_text(name: str, read: Callable[[], str]) -> str:
    """What `read` returns. Raises ValueError, which begins with the name, for bytes that are no UTF-8: Python refuses
    them in a stream and carries them as surrogates in an argument."""
    try:
        text = read()
        text.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        found = error.object[error.start]
        byte = found if isinstance(found, int) else ord(found) & 0xFF
        raise ValueError(
            f"{name} must be text in UTF-8, in which the byte 0x{byte:02x} does not fit; set the terminal to UTF-8, or "
            "turn the text into it, such as with iconv -f LATIN1 -t UTF-8"
        ) from error
    return text


def converse(continuer: "Continuer", *, seed: int, quiet: bool) -> None:
    """Continue one line of standard input after another, line n by seed + n; an empty line or the end of the input ends
    it, Ctrl-C the continuation that is being written only. Raises ValueError for a line that is not UTF-8."""
    for number, prompt in enumerate(_read_prompts()):
        try:
            stream_text(continuer, prompt, seed + number, sys.stdout)
        except KeyboardInterrupt:
            print(flush=True)
            continue
        finally:
            speed = continuer.take_speed()
        if not quiet:
            print(speed.describe(), file=sys.stderr)


def _read_prompts() -> Iterator[str]:
    while True:
        try:
            prompt = read_text("--interactive", lambda: input("> ") if sys.stdin.isatty() else input())
        except EOFError:
            return
        if not prompt:
            return
        yield prompt
