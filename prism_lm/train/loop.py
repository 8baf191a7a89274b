"""The training loop: fetch, step, log, evaluate, save, stop."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from prism_lm.parallel.collectives import RunFailed, raise_together, sum_integers
from prism_lm.parallel.mesh import process_group
from prism_lm.train.metrics import observe_mixers, read_peak_gib
from prism_lm.train.outcome import Ending, read_status, reporting, write_start
from prism_lm.train.schedule import compute_rate_fraction
from prism_lm.train.session import Session, choose_start, open_session, open_validation_pass, save_session
from prism_lm.train.state import Status, TrainRun
from prism_lm.train.step import (
    StepResult,
    TrainBatch,
    compute_validation_loss,
    count_valid_tokens,
    move_to_device,
    train_step,
)
from prism_lm.train.stop_signal import StopSignal


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """This rank's micro-batches of one update, and what all ranks agreed on while fetching."""

    batches: list[TrainBatch]
    valid_tokens: int
    "Labels with loss in the global batch."
    tokens: int
    "Positions in the global batch."
    stop_requested: bool


def run_training(run: TrainRun) -> Status:
    """Trains until train.steps or a stop signal, from the newest checkpoint in run_dir if there is one.

    Call it on every rank, without a process group. Raises ValueError for settings that cannot run, before any process
    group starts; RunFailed, with one text on all ranks, when the run must end. A start that is refused leaves the
    records in run_dir as they were; of a run that started, result.json says how it ended.
    """
    start = choose_start(run)
    if start.state.step >= run.train.steps and read_status(run.run_dir) == "finished":
        return "finished"
    run.run_dir.mkdir(parents=True, exist_ok=True)
    ending = Ending(state=start.state, losses={})
    with StopSignal() as stop, process_group(run.ranks), ExitStack() as stack:
        session = open_session(run, start, stop, stack)
        write_start(run, start.state)
        with reporting(run, ending), session.recorder:
            if start.folder is not None:
                session.recorder.say(f"resuming from {start.folder}")
            session.manager.clean()
            session.meter.start(step=session.state.step, tokens=session.state.tokens)
            ending.status = train_until_done(session, ending)
    return ending.status


def train_until_done(session: Session, ending: Ending) -> Status:
    """The loop itself: whole steps until the last one or until any rank was asked to stop; then a checkpoint."""
    run, state = session.run, session.state
    stopping = False
    while state.step < run.train.steps and not stopping:
        fetched = fetch(session)
        stopping = fetched.stop_requested
        result = update(session, fetched)
        note_progress(session, result)
        note_histograms(session, fetched.batches[0])
        note_validation(session)
        record(session, ending)
        end_if_stuck(session, result)
        if session.manager.is_due(state.step):
            save(session)
    save(session)
    return "finished" if state.step >= run.train.steps else "preempted"


def fetch(session: Session) -> Fetched:
    """This rank's micro-batches of the next update. A loader error on any rank is raised on all of them."""
    batches, error = _take_batches(session)
    valid_tokens, tokens, stops, errors = sum_integers(
        [
            count_valid_tokens(batches),
            sum(batch["input_ids_BT"].numel() for batch in batches),
            int(session.stop.requested),
            int(error is not None),
        ]
    )
    if errors:
        raise_together(error)
    return Fetched(batches=batches, valid_tokens=valid_tokens, tokens=tokens, stop_requested=stops > 0)


def _take_batches(session: Session) -> tuple[list[TrainBatch], Exception | None]:
    """The micro-batches, or the error met on the way; the generators that a model may draw from do not move."""
    with session.meter.waiting(), torch.random.fork_rng(devices=[]):
        try:
            return [next(session.micro_batches) for _ in range(session.accumulation_steps)], None
        except StopIteration:
            words = f"the training loader ended in step {session.state.step + 1} and must be endless"
            return [], RuntimeError(f"{words}; pass one that begins again")
        except Exception as error:
            return [], error


def update(session: Session, fetched: Fetched) -> StepResult:
    """One update at this step's learning rate; the state moves on by one step whether or not it was applied."""
    train = session.run.train
    fraction = compute_rate_fraction(train.schedule, step=session.state.step, total_steps=train.steps)
    result = train_step(
        session.engine,
        fetched.batches,
        valid_tokens=fetched.valid_tokens,
        world_size=session.run.ranks.world_size,
        learning_rate=train.optim.learning_rate * fraction,
    )
    session.state.advance(tokens=fetched.tokens, applied=result.applied)
    return result


def note_progress(session: Session, result: StepResult) -> None:
    """Takes down the figures of the first, the last and every step due to be logged, and of one not applied."""
    state, train = session.state, session.run.train
    if not (is_due(train.log_every_steps, state.step) or state.step in (1, train.steps) or not result.applied):
        return
    loss_nats = float(result.loss_nats)
    session.figures |= {
        "train/loss_nats": loss_nats,
        "train/skipped_steps": float(state.skipped_steps),
        "optim/learning_rate": result.learning_rate,
        "optim/grad_norm": result.grad_norm,
        **session.meter.read(step=state.step, tokens=state.tokens),
        "memory/peak_gib": read_peak_gib(session.engine.device),
    }


def note_histograms(session: Session, batch: TrainBatch) -> None:
    """When due, runs one more forward pass, without gradients, and keeps what the mixers did in it."""
    if not is_due(session.run.train.histogram_every_steps, session.state.step):
        return
    with session.meter.paused(), observe_mixers(session.engine.model) as seen:
        session.engine.evaluate_loss(move_to_device(batch, session.engine.device))
    session.histograms = seen


def note_validation(session: Session) -> None:
    """When due, and after the last step, evaluates on the validation rows."""
    every, step = session.run.train.eval_every_steps, session.state.step
    if not (is_due(every, step) or (every and step == session.run.train.steps)):
        return
    with session.meter.paused(), torch.random.fork_rng(devices=[]):
        loss_nats = compute_validation_loss(session.engine, open_validation_pass(session))
    session.figures["validation/loss_nats"] = loss_nats


def record(session: Session, ending: Ending) -> None:
    """Writes down what this step left to record, if anything, as one record."""
    if session.figures or session.histograms:
        session.recorder.write(session.state.step, session.state.tokens, session.figures, session.histograms)
    ending.losses |= {tag: value for tag, value in session.figures.items() if tag.endswith("/loss_nats")}
    session.figures, session.histograms = {}, {}


def end_if_stuck(session: Session, result: StepResult) -> None:
    """Says what was not finite; raises RunFailed once train.max_nonfinite_steps steps in a row were not applied."""
    if result.applied:
        return
    state, limit = session.state, session.run.train.max_nonfinite_steps
    session.recorder.say(f"step {state.step} was not applied: {result.problem} is not finite")
    if state.nonfinite_in_a_row >= limit:
        raise RunFailed(
            f"{result.problem} is not finite in step {state.step}, the last of {state.nonfinite_in_a_row} such steps "
            f"in a row (train.max_nonfinite_steps={limit}); weights are as before the first of them: lower "
            "train.optim.learning_rate, or look at the data of these steps"
        )


def save(session: Session) -> None:
    """Publishes a checkpoint of this step; the time does not count as training."""
    with session.meter.paused():
        save_session(session)


def is_due(every_steps: int, step: int) -> bool:
    """True at the positive multiples of every_steps; never with 0."""
    return every_steps > 0 and step > 0 and step % every_steps == 0
