"""The training loop: fetch, step, log, evaluate, save, stop."""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch

from prism_lm.parallel.collectives import RunFailed, raise_together, sum_integers
from prism_lm.parallel.mesh import COLLECTIVE_TIMEOUT_S, process_group
from prism_lm.train import order_hash
from prism_lm.train.guard import Guard, guarding
from prism_lm.train.metrics import observe_mixers, read_peak_gib
from prism_lm.train.outcome import Ending, read_status, reporting, write_failure, write_start
from prism_lm.train.probe import cut_row
from prism_lm.train.schedule import compute_rate_fraction
from prism_lm.train.session import Session, choose_start, open_session, save_session
from prism_lm.train.spike import SpikeGuard
from prism_lm.train.state import Status, TrainRun, capture_generators, restore_generators
from prism_lm.train.step import (
    StepResult,
    TrainBatch,
    count_valid_tokens,
    move_to_device,
    train_step,
)
from prism_lm.train.stop_signal import StopSignal
from prism_lm.train.task_pass import describe_scores, score
from prism_lm.train.validation import evaluate
from prism_lm.train.waiting import STOPPED, call_interruptibly
from prism_lm.train.watchdog import Limits

STRAGGLER = "speed/straggler"


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """This rank's micro-batches of one update, and what all ranks agreed on while fetching."""

    batches: list[TrainBatch]
    valid_tokens: int
    "Labels with loss in the global batch."
    tokens: int
    "Positions in the global batch."
    batch_hash: int
    "Sum modulo 2^63 of the hashes of the global batch's rows."


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
    timeout_s = max(COLLECTIVE_TIMEOUT_S, 2 * run.train.hang_timeout_s)
    with (
        StopSignal() as stop,
        guard_run(run, stop, ending) as guard,
        process_group(run.ranks, timeout_s=timeout_s),
        ExitStack() as stack,
    ):
        start = choose_start(run)  # the folder is held only now: another start may have ended in it meanwhile
        ending.state, ending.check_owner = start.state, guard.owner.check
        session = open_session(run, start, stop, guard, stack)
        write_start(run, start.state, start.folder)
        with reporting(run, ending), session.recorder:
            if start.folder is not None:
                session.recorder.say(f"resuming from {start.folder}")
            session.manager.clean()
            session.meter.start(step=session.state.step, tokens=session.state.tokens)
            ending.status = train_until_done(session, ending)
    return ending.status


def guard_run(run: TrainRun, stop: StopSignal, ending: Ending) -> AbstractContextManager[Guard]:
    """Holds the run's folder and watches over the run; what it must end is written down as this ending."""
    train = run.train
    limits = Limits(
        hang_timeout_s=train.hang_timeout_s, rank_timeout_s=train.rank_timeout_s, stop_grace_s=train.stop_grace_s
    )
    return guarding(
        run.run_dir, run.ranks, stop, limits=limits, on_end=lambda error: write_failure(run.run_dir, ending, error)
    )


def train_until_done(session: Session, ending: Ending) -> Status:
    """The loop itself: whole steps until the last one or until any rank was asked to stop; then a checkpoint. An
    evaluation that a stop kept from being made comes first of all."""
    run, state = session.run, session.state
    first_step = state.step
    note_validation(session)
    note_tasks(session)
    record(session, ending)
    while state.step < run.train.steps:
        fetched = fetch(session)
        if fetched is None:
            break
        result = update(session, fetched, may_stop=state.step == first_step)
        if result is None:
            break
        note_progress(session, result)
        note_stragglers(session)
        note_histograms(session, fetched.batches[0])
        note_validation(session)
        note_tasks(session)
        record(session, ending)
        end_if_stuck(session, result)
        if session.manager.is_due(state.step):
            save(session, wait=False)
    save(session, wait=True)
    session.guard.watchdog.finish()
    is_done = state.step >= run.train.steps and not (state.validation_due or state.tasks_due)
    return "finished" if is_done else "preempted"


def fetch(session: Session) -> Fetched | None:
    """This rank's micro-batches of the next update; None where any rank was asked to stop: the run then ends where it
    stood before. A loader error on any rank is raised on all of them."""
    session.guard.watchdog.beat(f"data of step {session.state.step + 1}")
    session.position = session.loader.state_dict()
    batches, error = _take_batches(session)
    hashes = [batch["row_hash_B"] for batch in batches if session.run.ranks.sequence_rank == 0]
    mine = [
        count_valid_tokens(batches),
        sum(batch["input_ids_BT"].numel() for batch in batches),
        order_hash.hash_batch(hashes),
        int(session.stop.requested),
        int(error is not None),
        *session.manager.describe_progress(),
    ]
    with session.stragglers.agreeing():
        valid_tokens, tokens, batch_hash, stops, errors, written, failed = sum_integers(mine)
    session.manager.note_agreed(written, failed)
    if errors:
        raise_together(error)
    if stops:
        return None
    return Fetched(
        batches=batches, valid_tokens=valid_tokens, tokens=tokens, batch_hash=batch_hash & order_hash.SUM_MASK
    )


def _take_batches(session: Session) -> tuple[list[TrainBatch], Exception | None]:
    """The micro-batches, or none where a stop came first, or the error met on the way; the generators that a model may
    draw from do not move."""
    batches: list[TrainBatch] = []
    with session.meter.waiting(), torch.random.fork_rng(devices=[]):
        try:
            while len(batches) < session.accumulation_steps:
                batch = call_interruptibly(lambda: next(session.micro_batches), lambda: session.stop.requested)
                if batch is STOPPED:
                    return [], None
                batches.append(batch)
        except StopIteration:
            words = f"the training loader ended in step {session.state.step + 1} and must be endless"
            return [], RuntimeError(f"{words}; pass one that begins again")
        except Exception as error:
            return [], error
    return batches, None


def update(session: Session, fetched: Fetched, *, may_stop: bool) -> StepResult | None:
    """One update at this step's learning rate; the state moves on by one step whether or not it was applied.

    may_stop: the ranks agree between micro-batches, the first of which may compile for minutes, whether any was asked
    to stop; the result is then None, and the run stands where it stood before.
    """
    train, state = session.run.train, session.state
    session.guard.watchdog.beat(f"step {state.step + 1}")
    fraction = compute_rate_fraction(train.schedule, step=state.step, total_steps=train.steps)
    generators = capture_generators() if may_stop else None
    result = train_step(
        session.engine,
        fetched.batches,
        valid_tokens=fetched.valid_tokens,
        world_size=session.run.ranks.world_size,
        learning_rate=train.optim.learning_rate * fraction,
        max_loss_nats=build_spike_guard(session).threshold(),
        should_stop=lambda: may_stop and session.agree_on_stop(),
    )
    if result is not None:
        advance(session, fetched, result)
    elif generators is not None:
        restore_generators(generators)
    return result


def advance(session: Session, fetched: Fetched, result: StepResult) -> None:
    """State and place in the data after a step; with the spike guard on, the host waits for the step's loss here."""
    state, train = session.state, session.run.train
    if not train.spike_window_steps:
        state.spike_window = []
    elif result.applied:
        state.spike_window = build_spike_guard(session).extend(float(result.loss_nats))
    state.advance(tokens=fetched.tokens, applied=result.applied, batch_hash=fetched.batch_hash)
    state.validation_due = is_due(train.eval_every_steps, state.step) or state.step == train.steps
    state.tasks_due = is_due(train.tasks.every_steps, state.step) or state.step == train.steps
    session.position = session.loader.state_dict()
    session.probe_row = cut_row(fetched.batches[0])


def build_spike_guard(session: Session) -> SpikeGuard:
    """The spike guard as the run stands."""
    train, losses = session.run.train, session.state.spike_window
    return SpikeGuard(window_steps=train.spike_window_steps, deviations=train.spike_deviations, losses=losses)


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


def note_stragglers(session: Session) -> None:
    """Takes down this rank's times of the step; when due, compares those of all ranks and names a slow one."""
    report = session.stragglers.end_step(session.state.step)
    if report is None:
        return
    session.figures |= report.figures
    session.texts["speed/slowest_name"] = report.name
    if report.text:
        session.texts[STRAGGLER] = report.text


def note_histograms(session: Session, batch: TrainBatch) -> None:
    """When due, runs one more forward pass, without gradients, and keeps what the mixers did in it."""
    if not is_due(session.run.train.histogram_every_steps, session.state.step):
        return
    with session.meter.paused(), observe_mixers(session.engine.model) as seen:
        session.engine.evaluate_loss(move_to_device(batch, session.engine.device))
    session.histograms = seen


def note_validation(session: Session) -> None:
    """When due, evaluates on the validation rows; a pass that a stop ended leaves no figure and stays due."""
    if session.state.validation_due and session.run.train.eval_every_steps:
        with session.meter.paused(), torch.random.fork_rng(devices=[]):
            losses = evaluate(session)
        if losses is None:
            return
        session.figures |= losses
    session.state.validation_due = False


def note_tasks(session: Session) -> None:
    """The same of the tasks of train.tasks."""
    if session.state.tasks_due and session.run.train.tasks.every_steps:
        with session.meter.paused():
            figures = score(session)
        if figures is None:
            return
        session.figures |= figures
    session.state.tasks_due = False


def record(session: Session, ending: Ending) -> None:
    """Writes down what this step left to record, if anything, as one record. Rank 0 raises RunFailed instead where
    another start has taken the folder over by now."""
    state = session.state
    if session.figures or session.histograms:
        if session.run.ranks.is_main:
            ending.check_owner()
        texts = {"data/order_hash": state.order_hash, **session.texts}
        session.recorder.write(state.step, state.tokens, session.figures, session.histograms, texts)
        if scores := describe_scores(session.figures, session.run.train.tasks.names):
            session.recorder.say(f"step {state.step} tasks: {scores}")
        if STRAGGLER in texts:
            session.recorder.remark(state.step, STRAGGLER, texts[STRAGGLER])
    ending.losses |= {tag: value for tag, value in session.figures.items() if tag.endswith("/loss_nats")}
    session.figures, session.histograms, session.texts = {}, {}, {}


def end_if_stuck(session: Session, result: StepResult) -> None:
    """Says why a step was not applied; raises RunFailed once train.max_skipped_steps in a row were not."""
    if result.applied:
        return
    state, limit = session.state, session.run.train.max_skipped_steps
    session.recorder.say(f"step {state.step} was not applied: {result.problem}")
    if state.skipped_in_a_row >= limit:
        raise RunFailed(
            f"{result.problem} in step {state.step}, the last of {state.skipped_in_a_row} steps in a row that were not "
            f"applied (train.max_skipped_steps={limit}); weights are as before the first of them: lower "
            "train.optim.learning_rate, or look at the data of these steps"
        )


def save(session: Session, *, wait: bool) -> None:
    """Saves this step; wait: returns once its checkpoint is published. The time does not count as training."""
    session.guard.watchdog.beat(f"checkpoint of step {session.state.step}")
    with session.meter.paused():
        save_session(session, wait=wait)


def is_due(every_steps: int, step: int) -> bool:
    """True at the positive multiples of every_steps; never with 0."""
    return every_steps > 0 and step > 0 and step % every_steps == 0
