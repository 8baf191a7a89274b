"""The cells of a probe, a task, a model and a seed each: which are done, and how those that are not are run.

A cell's file is OUT/cells/<task>/<model>/seed_<n>.json, written once and whole. Importing this file loads no torch.
"""

import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from prism_lm.eval.probes.config import ProbeConfig
from prism_lm.eval.probes.models import configure_model
from prism_lm.model.cost import count_parameters
from prism_lm.model.peer_rules import describe_model


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training to be done, by names alone, so that it can be sent to a process."""

    task: str
    model: str
    seed: int
    config: ProbeConfig

    def identity(self) -> dict[str, Any]:
        """All that decides the result, as it stands in the cell's file."""
        model = configure_model(self.model)
        return {
            "task": self.task,
            "model": self.model,
            "seed": self.seed,
            "recipe": asdict(self.config),
            "config": describe_model(model),
            "parameters": count_parameters(model),
        }

    def file(self, out: Path) -> Path:
        return out / "cells" / self.task / self.model / f"seed_{self.seed}.json"

    def __str__(self) -> str:
        return f"{self.task} {self.model} seed {self.seed}"


class ProbeFailed(RuntimeError):
    """Some cells came to no result."""


def read_cell(cell: Cell, out: Path) -> dict[str, Any] | None:
    """The finished cell, or None. Raises ValueError where the file is of another recipe or model."""
    file = cell.file(out)
    if not file.is_file():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for key, value in cell.identity().items():
        if found.get(key) != value:
            raise ValueError(f"--out={out} holds {cell} with another {key}; a folder keeps one; use another --out")
    return found


def run_cell(cell: Cell, out: str, device: str) -> dict[str, Any]:
    """Train one cell, write its file and return it. On a CPU it takes one thread."""
    import torch

    from prism_lm.eval.probes.cell import train_cell
    from prism_lm.eval.probes.tasks import TASKS
    from prism_lm.model.kernels import select_operators
    from prism_lm.model.lm import build_model

    with _one_thread():
        operators = select_operators(torch.device(device).type)
        model = build_model(configure_model(cell.model), seed=cell.seed, device=device, operators=operators)
        result = train_cell(model, TASKS[cell.task], cell.config, seed=cell.seed, device=device)
    found = json.loads(json.dumps({**cell.identity(), "device": device, **asdict(result)}))
    _write_whole(cell.file(Path(out)), json.dumps(found, indent=1))
    return found


@contextmanager
def _one_thread() -> Generator[None]:
    """Cells are shared out over cores; within one, tensors are too small to be cut."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_whole(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(file)


def run_cells(
    cells: list[Cell], out: Path, *, device: str, workers: int, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every cell's result, in order; those with a file are read, the others run in `workers` processes.

    Raises ProbeFailed, once all others are done, for cells that came to no result.
    """
    results = {cell: found for cell in cells if (found := read_cell(cell, out)) is not None}
    missing = [cell for cell in cells if cell not in results]
    if results:
        report(f"{len(results)} of {len(cells)} cells were finished before")
    progress = CellProgress(len(missing), report)
    failures: list[str] = []
    for cell, outcome in _run_missing(missing, out, device, workers):
        if isinstance(outcome, Exception):
            failures.append(f"{cell} ({outcome})")
            progress.advance(f"{cell}: failed: {outcome}")
        else:
            results[cell] = outcome
            progress.advance(f"{cell}: {100 * outcome['accuracy']:.1f}% in {outcome['wall_s']:.1f} s")
    if failures:
        raise ProbeFailed(f"{len(failures)} of {len(cells)} cells must be run again: {'; '.join(failures)}")
    return [results[cell] for cell in cells]


def _run_missing(
    cells: list[Cell], out: Path, device: str, workers: int
) -> Iterator[tuple[Cell, dict[str, Any] | Exception]]:
    """Each cell as it ends, with what came of it."""
    if min(workers, len(cells)) <= 1:
        for cell in cells:
            yield cell, _try(lambda cell=cell: run_cell(cell, str(out), device))
        return
    pool = ProcessPoolExecutor(min(workers, len(cells)), mp_context=get_context("spawn"))
    try:
        futures: dict[Future[dict[str, Any]], Cell] = {
            pool.submit(run_cell, cell, str(out), device): cell for cell in cells
        }
        for future in as_completed(futures):
            yield futures[future], _try(future.result)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _try(run: Callable[[], dict[str, Any]]) -> dict[str, Any] | Exception:
    try:
        return run()
    except (RuntimeError, ValueError) as error:
        return error


class CellProgress:
    """A line for each cell that ends, with how many are done and the time that the rest will take."""

    def __init__(
        self, num_cells: int, report: Callable[[str], None], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_cells, self._report, self._now = num_cells, report, now
        self._done, self._began_s = 0, now()

    def advance(self, line: str) -> None:
        """One more has ended."""
        self._done += 1
        left = self._num_cells - self._done
        left_s = round((self._now() - self._began_s) / self._done * left)
        eta = f"  ETA {left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d}" if left else ""
        self._report(f"{self._done}/{self._num_cells}  {line}{eta}")
