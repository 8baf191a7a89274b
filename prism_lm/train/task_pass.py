"""One scoring of the run's tasks between two steps, given up by all ranks together when any is asked to stop."""

from collections.abc import Mapping, Sequence

from prism_lm.parallel.collectives import RunFailed
from prism_lm.train.session import Session
from prism_lm.train.state import capture_generators, restore_generators


class _StopAsked(Exception):
    """Ends a scoring that nobody waits for any more."""


def score(session: Session) -> dict[str, float] | None:
    """The figures of the run's tasks as the model stands; None where any rank was asked to stop. Generators stay as
    they are, and errors are raised on all ranks."""

    def look() -> None:
        session.guard.watchdog.touch()
        if session.stop.requested:
            raise _StopAsked("asked to stop")

    scorer = session.run.task_scorer
    assert scorer is not None
    session.guard.watchdog.beat(f"tasks of step {session.state.step}")
    if session.agree_on_stop():
        return None
    generators = capture_generators()
    try:
        with session.engine.whole_model() as model:
            return scorer(model, look=look)
    except RunFailed:
        if session.agree_on_stop():
            return None
        raise
    finally:
        restore_generators(generators)


def describe_scores(figures: Mapping[str, float], names: Sequence[str]) -> str:
    """The tasks' figures in words, without those of a group's members; empty where there are none."""
    words: list[str] = []
    for name in names:
        prefix = f"eval/{name}/"
        found = {tag.removeprefix(prefix): value for tag, value in figures.items() if tag.startswith(prefix)}
        words += [f"{name} {' '.join(f'{metric} {value:.4g}' for metric, value in found.items())}"] if found else []
    return ", ".join(words)
