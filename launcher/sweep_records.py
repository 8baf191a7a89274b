"""What the runs of a study's folder came to, read without torch.

The folder: study.yaml, the study as it was last asked for; configs/RUN.yaml, the complete configuration of each run;
runs/RUN/, ordinary run folders; logs/RUN.log, what a run that was started here printed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config import RunConfig, load_config
from launcher.run_status import RunStatus, read_run
from launcher.slurm_jobs import SlurmJob
from launcher.study import PlannedRun, Study, expand_study
from prism_lm.train.lineage import read_result

STUDY_NAME = "study.yaml"
LOSS_ENDING = "/loss_nats"
VALIDATION_LOSS = "validation/loss_nats"
START_MARK = "prism sweep: a start at "


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run of a study: what was asked, and how far it came."""

    name: str
    overrides: list[str]
    config: RunConfig
    "As configs/NAME.yaml holds it."
    group: str
    "The name without the seed."
    seed: int
    status: str
    """finished, running, queued, starting, preempted, killed or failed; missing: it was never started; shorter: it
    finished fewer steps than its configuration asks for by now."""
    step: int
    tokens: int
    losses: dict[str, float]
    "The last ones in nats a token: train/loss_nats, validation/loss_nats and those of single sources."
    tokens_per_s: float | None
    "Of the last line of metrics."
    eta_s: float | None
    "Seconds to the last step, while it runs."
    error: str | None
    "Of a run that failed."


def read_study(folder: Path) -> Study:
    """The study of a folder. Raises ValueError where prism sweep made none there."""
    if not (folder / STUDY_NAME).is_file():
        raise ValueError(f"FOLDER={folder} must be the folder of a study; prism sweep STUDY.yaml makes one")
    return load_config(Study, folder / STUDY_NAME)


def read_study_records(folder: Path) -> list[Record]:
    """Every run of the study in its order, whatever became of it. Raises ValueError for a folder that is no study's,
    or that lacks a run's configuration."""
    return [read_record(folder, run) for run in expand_study(read_study(folder))]


def read_record(folder: Path, run: PlannedRun, jobs: Sequence[SlurmJob] = ()) -> Record:
    """How one run stands."""
    path = config_file(folder, run.name)
    if not path.is_file():
        raise ValueError(f"{path} must be there for a run of {folder / STUDY_NAME}; start prism sweep again")
    config = load_config(RunConfig, path)
    found = read_run(run_folder(folder, run.name), jobs)
    status, error = _find_status(folder, run.name, config, found)
    return Record(
        name=run.name,
        overrides=run.overrides,
        config=config,
        group=run.group,
        seed=config.seed,
        status=status,
        step=found.step,
        tokens=found.tokens,
        losses=_find_losses(folder, run.name, found),
        tokens_per_s=found.tokens_per_s,
        eta_s=found.eta_s,
        error=error,
    )


def _find_status(folder: Path, name: str, config: RunConfig, found: RunStatus) -> tuple[str, str | None]:
    """The word for how a run stands, as Record has it, and its error."""
    if found.state == "never started":
        said = _find_error(log_file(folder, name))
        return ("failed", said) if said else ("missing", None)
    if found.state == "finished":
        return ("finished" if found.step >= config.train.steps else "shorter"), None
    return found.state, found.detail if found.state in ("failed", "unknown") else None


def config_file(folder: Path, name: str) -> Path:
    """Where a run's configuration lies in a study's folder."""
    return folder / "configs" / f"{name}.yaml"


def run_folder(folder: Path, name: str) -> Path:
    """Where a run lies in a study's folder."""
    return folder / "runs" / name


def log_file(folder: Path, name: str) -> Path:
    """What a run that was started here printed, every start's."""
    return folder / "logs" / f"{name}.log"


def begin_log(folder: Path, name: str) -> None:
    """Marks where the next start's words begin."""
    path = log_file(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as log:
        log.write(f"{START_MARK}{time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n")


def _find_losses(folder: Path, name: str, found: RunStatus) -> dict[str, float]:
    """Those of the ending; of a run that has none, those of its last lines of metrics."""
    try:
        ending = read_result(run_folder(folder, name)) or {}
    except ValueError:
        ending = {}
    known = {"train/loss_nats": found.loss_nats, VALIDATION_LOSS: found.validation_loss_nats}
    known |= {tag: value for tag, value in ending.items() if tag.endswith(LOSS_ENDING)}
    return {tag: float(value) for tag, value in known.items() if value is not None}


def _find_error(log: Path) -> str | None:
    """What the newest start said that ended before it left any record in its folder."""
    if not log.is_file():
        return None
    said = log.read_text(errors="replace").rpartition(START_MARK)[2].splitlines()
    errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
    return errors[-1] if errors else None
