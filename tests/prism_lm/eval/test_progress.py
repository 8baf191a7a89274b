import io

import pytest

from prism_lm.eval.progress import ProgressLine, Share


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Shows what it was set to."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def read_through(stream: io.StringIO | None, *, step_s: float) -> None:
    """A scoring of three equal parts."""
    clock = Clock()
    line = ProgressLine(stream, now=clock)
    line.begin("loglikelihood", 3000, 30_000)
    for _ in range(3):
        clock.now_s += step_s
        line.advance(1000, 10_000)
    line.end()


def test_a_terminal_has_one_line_that_is_rewritten() -> None:
    stream = Terminal()
    read_through(stream, step_s=20.0)
    assert stream.getvalue().count("\n") == 1
    first, *_, last = stream.getvalue().split("\r\x1b[K")[1:]
    assert first == "loglikelihood 1,000/3,000 requests  500 tokens/s  ETA 0:00:40"
    assert last == "loglikelihood 3,000/3,000 requests  500 tokens/s  0:01:00\n"


@pytest.mark.parametrize(("step_s", "lines"), [(1.0, 1), (20.0, 2), (40.0, 4)])
def test_a_file_has_a_line_every_half_minute_and_one_at_the_end(step_s: float, lines: int) -> None:
    stream = io.StringIO()
    read_through(stream, step_s=step_s)
    assert len(stream.getvalue().splitlines()) == lines
    assert "\r" not in stream.getvalue()


def test_other_ranks_write_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    read_through(None, step_s=40.0)
    assert capsys.readouterr() == ("", "")


class Tally:
    """Adds up what it is told."""

    def __init__(self) -> None:
        self.requests = self.tokens = 0
        self.is_over = False

    def begin(self, name: str, num_requests: int, num_tokens: int, /) -> None:
        self.promised = (num_requests, num_tokens)

    def advance(self, num_requests: int, num_tokens: int, /) -> None:
        self.requests += num_requests
        self.tokens += num_tokens

    def end(self) -> None:
        self.is_over = True


@pytest.mark.parametrize("parts", [[], [7], [3, 3, 1]])
def test_a_share_tells_of_the_whole_work_and_ends_with_all_of_it(parts: list[int]) -> None:
    tally = Tally()
    share = Share(tally, "generate", num_requests=10, num_tokens=28, own_tokens=sum(parts))
    for part in parts:
        share.advance(part)
    assert tally.tokens == (28 if parts else 0)
    share.end()
    assert (tally.requests, tally.tokens) == tally.promised == (10, 28)
    assert tally.is_over


def test_a_share_half_read_tells_half_of_the_work() -> None:
    tally = Tally()
    Share(tally, "generate", num_requests=10, num_tokens=400, own_tokens=100).advance(50)
    assert (tally.requests, tally.tokens) == (5, 200)
