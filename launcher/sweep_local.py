"""Runs of a study, one after another on this machine, each a process of its own; stopped, it goes on where it was."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from launcher.run_folder import spell_age
from launcher.sweep_folder import StudyRun
from launcher.sweep_records import VALIDATION_LOSS, Record, begin_log, config_file, log_file, read_record
from prism_lm.model.cost import flops_per_token

EXIT_PREEMPTED = 75
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Of the run's own process alone; a sweep that is started in a job's step is no rank of it.
_DROPPED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "PRISM_PREEMPTED_EXIT")


class Training(Protocol):
    """What is needed of a process that trains."""

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        ...

    def terminate(self) -> None:
        """Asks it to save and end; again, to end at once."""
        ...


def start_training(config: Path, log: Path) -> Training:
    """`prism train CONFIG` as a process whose words are added to the log."""
    environ = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    with log.open("ab") as file:
        # A session of its own: Ctrl-C reaches this process alone, which hands it on.
        return subprocess.Popen(
            [sys.executable, "-m", "launcher", "train", str(config)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )


class LocalRunner:
    """Trains runs on this machine, a process each, and says how each ended and how long the others may take."""

    def __init__(self, folder: Path, todo: Sequence[StudyRun], *, num_runs: int) -> None:
        self.folder, self.todo = folder, todo
        self.is_stopped = False
        self._process: Training | None = None
        self._num_runs, self._done_flops, self._done_s = num_runs, 0.0, 0.0

    def run_all(self) -> None:
        """Until the last run has ended, however, or a signal asks to stop."""
        with self._listening():
            for index, run in enumerate(self.todo):
                if self.is_stopped:
                    return
                place = f"[{self._num_runs - len(self.todo) + index + 1}/{self._num_runs}] {run.name}"
                before = self._read(run)
                if before.status in ("finished", "running"):
                    print(f"{place}: {before.status} meanwhile, and left as it is", flush=True)
                    continue
                print(f"{place}: {self._say_begin(before)}", flush=True)
                started_s = time.monotonic()
                code = self._train(run)
                took_s = time.monotonic() - started_s
                after = self._read(run)
                self._done_s += took_s
                self._done_flops += measure_work(before) - measure_work(after)
                print(f"{place}: {spell_end(after, code, took_s)}{self._say_rest(self.todo[index + 1 :])}", flush=True)

    def _train(self, run: StudyRun) -> int:
        """The exit code. A run that ended without a record in its folder leaves its error in its log."""
        begin_log(self.folder, run.name)
        log = log_file(self.folder, run.name)
        self._process = start_training(config_file(self.folder, run.name), log)
        if self.is_stopped:
            self._process.terminate()
        code = self._process.wait()
        self._process = None
        if code not in (0, EXIT_PREEMPTED) and self._read(run).status == "missing" and not self.is_stopped:
            with log.open("a") as file:
                file.write(f"error: prism train ended with exit code {code}; see {log}\n")
        return code

    @contextmanager
    def _listening(self) -> Generator[None, None, None]:
        former = {number: signal.signal(number, self._on_stop) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if not self.is_stopped:
            os.write(2, b"stopping: the run saves itself first\n")
        self.is_stopped = True
        if self._process is not None:
            self._process.terminate()

    def _read(self, run: StudyRun) -> Record:
        return read_record(self.folder, run.plan)

    def _say_begin(self, record: Record) -> str:
        words = f"from step {record.step:,} of" if record.step else "training"
        return f"{words} {record.config.train.steps:,} steps; tail -F {log_file(self.folder, record.name)}"

    def _say_rest(self, rest: Sequence[StudyRun]) -> str:
        if not rest or self.is_stopped:
            return ""
        work = sum(measure_work(self._read(run)) for run in rest)
        rest_s = estimate_rest(self._done_flops, self._done_s, work)
        return f"; {len(rest)} to go" + ("" if rest_s is None else f", about {spell_age(rest_s)}")


def measure_work(record: Record) -> float:
    """FLOPs that the run has before it."""
    config = record.config
    tokens = config.train.global_batch_rows * config.data.row_tokens
    steps = max(0, config.train.steps - record.step)
    return float(steps * tokens * flops_per_token(config.model, config.data.row_tokens))


def estimate_rest(done_flops: float, done_s: float, rest_flops: float) -> float | None:
    """Seconds for the rest at the speed of what is done; None where nothing is."""
    return rest_flops * done_s / done_flops if done_flops > 0 else None


def spell_end(record: Record, code: int, took_s: float) -> str:
    """`finished: validation 3.2412 nats, step 280, 41 s`, or how else the run ended."""
    word = record.status if record.status not in ("running", "missing") else f"ended by code {code}"
    if record.error:
        return f"{word} at step {record.step:,} after {spell_age(took_s)}: {record.error.splitlines()[0]}"
    loss = record.losses.get(VALIDATION_LOSS)
    nats = "" if loss is None else f"validation {loss:.4f} nats, "
    return f"{word}: {nats}step {record.step:,}, {spell_age(took_s)}"
