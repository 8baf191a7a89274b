"""Validation passes: the same rows each time, given up by all ranks at one place when any is asked to stop."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from prism_lm.parallel.collectives import RunFailed, iterate_together, sum_integers
from prism_lm.train.session import Session
from prism_lm.train.step import TrainBatch, compute_validation_losses
from prism_lm.train.waiting import STOPPED, Wait, iterate_interruptibly


def evaluate(session: Session) -> dict[str, float] | None:
    """Mean nats over the first train.eval_rows validation rows over all ranks, with 0 over all, as figures: of all rows
    and, where they are of several sources, of each source's that has any. None where any rank was asked to stop. Errors
    are raised on all ranks."""
    sources = session.run.validation_sources if len(session.run.validation_sources) > 1 else ()
    losses = compute_validation_losses(session.engine, open_pass(session), num_sources=max(1, len(sources)))
    if losses is None:
        return None
    tags = ["validation/loss_nats", *(name_figure(source) for source in sources)]
    return {tag: loss for tag, loss in zip(tags, losses, strict=True) if loss is not None}


def name_figure(source: str) -> str:
    """The tag of a source's validation loss; what may not stand in a tag becomes `_`."""
    return f"validation/{re.sub(r'[^A-Za-z0-9_.-]', '_', source)}/loss_nats"


def open_pass(session: Session) -> Iterator[TrainBatch | None]:
    """This rank's micro-batches, kept from the first pass on where train.eval_rows limits them, else read anew each
    pass and never held together. None, as the last, where any rank was asked to stop."""
    kept: list[TrainBatch] = []
    is_empty = True
    for number, batch in enumerate(session.validation_batches or _read(session), start=1):
        session.guard.watchdog.beat(f"evaluation batch {number} of step {session.state.step}")
        is_stopped = batch is STOPPED or session.stop.requested
        if sum_integers([int(is_stopped)])[0] or batch is STOPPED:
            yield None
            return
        is_empty = False
        if session.run.train.eval_rows:
            kept.append(batch)
        yield batch
    if is_empty:
        raise RunFailed("the validation loader has no rows; set train.eval_every_steps=0 or prepare more data")
    session.validation_batches = kept


def _read(session: Session) -> Iterator[TrainBatch | Literal[Wait.STOPPED]]:
    assert session.validation_loader is not None
    train = session.run.train
    rows_at_once = train.micro_batch_rows * session.run.ranks.data_world_size
    batches = iterate_interruptibly(session.validation_loader, lambda: session.stop.requested)
    limit = -(-train.eval_rows // rows_at_once) if train.eval_rows else None
    return islice(iterate_together(batches, name="the validation loader"), limit)
