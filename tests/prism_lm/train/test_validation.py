"""One pass over the validation rows: how many, read how often, and where a stop ends it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from prism_lm.parallel.collectives import RunFailed
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.config import TrainConfig
from prism_lm.train.session import Session
from prism_lm.train.state import TrainState
from prism_lm.train.validation import name_figure, open_pass
from tests.harness import ListLoader


class CountedLoader(ListLoader):
    """Five micro-batches of two rows; counts those it gave."""

    def __init__(self, end_at: int = 5) -> None:
        super().__init__(Ranks(), global_rows=2, micro_rows=2, end_at=end_at, spoil=lambda step, batch: self.count())
        self.given = 0

    def count(self) -> None:
        self.given += 1


def build_session(loader: ListLoader, eval_rows: int) -> Session:
    """What a pass needs of one."""
    train = TrainConfig(global_batch_rows=2, micro_batch_rows=2, eval_every_steps=1, eval_rows=eval_rows)
    parts: dict[str, Any] = {
        "run": SimpleNamespace(train=train, ranks=Ranks()),
        "state": TrainState(step=1),
        "validation_loader": loader,
        "validation_batches": [],
        "stop": SimpleNamespace(requested=False),
        "guard": SimpleNamespace(watchdog=SimpleNamespace(beat=lambda phase: None)),
    }
    return cast(Session, SimpleNamespace(**parts))


@pytest.mark.parametrize(("eval_rows", "num_batches", "given"), [(0, 5, 10), (3, 2, 2), (99, 5, 5)])
def test_limited_rows_are_read_once_and_all_rows_anew_each_pass(eval_rows: int, num_batches: int, given: int) -> None:
    loader = CountedLoader()
    session = build_session(loader, eval_rows)
    first, second = (list(open_pass(session)) for _ in range(2))
    assert len(first) == len(second) == num_batches and loader.given == given
    for one, other in zip(first, second, strict=True):
        assert one is not None and other is not None
        assert one["input_ids_BT"].equal(other["input_ids_BT"])
    assert len(session.validation_batches) == (num_batches if eval_rows else 0)


@pytest.mark.parametrize("eval_rows", [0, 6])
def test_stop_ends_the_pass_with_none_and_keeps_no_part_of_the_rows(eval_rows: int) -> None:
    session = build_session(CountedLoader(), eval_rows)
    batches = open_pass(session)
    assert next(batches) is not None
    session.stop.requested = True
    assert list(batches) == [None]
    assert session.validation_batches == []


def test_split_without_rows_is_refused_with_the_remedy() -> None:
    class EmptyLoader(CountedLoader):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(RunFailed, match=r"the validation loader has no rows; set train\.eval_every_steps=0"):
        list(open_pass(build_session(EmptyLoader(), 0)))


def test_name_of_a_source_makes_a_tag_of_one_more_level() -> None:
    assert name_figure("RedPajamaC4") == "validation/RedPajamaC4/loss_nats"
    assert name_figure("my books: ä/1") == "validation/my_books____1/loss_nats"
