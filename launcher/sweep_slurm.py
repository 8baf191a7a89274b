"""A study's unfinished runs as one SLURM job array, by what `prism submit --array` checks, writes and queues.

The list, FOLDER/sweep.txt, is what slurm/sweep.sh reads too: sbatch --array=0-11%4 slurm/sweep.sh FOLDER/sweep.txt
"""

import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launcher.config import dump_config
from launcher.sweep_folder import StudyRun
from launcher.sweep_records import config_file
from prism_lm.checkpoint.folder import write_whole

LIST_NAME = "sweep.txt"


def submit_runs(folder: Path, todo: Sequence[StudyRun], options: Sequence[str], *, name: str) -> int:
    """Writes the list and submits it; `options` are those of prism submit. Raises ValueError as that does, with the
    runs' names in place of the list's lines."""
    write_whole(folder / LIST_NAME, "".join(_spell_line(folder, run) for run in todo).encode())
    # prism submit names the job after the list's file.
    with tempfile.TemporaryDirectory(prefix="prism-sweep-") as place:
        named = Path(place) / f"{name}.txt"
        named.symlink_to((folder / LIST_NAME).absolute())
        return _submit(named, todo, options)


def preview_submission(todo: Sequence[StudyRun], options: Sequence[str], *, name: str) -> int:
    """What submit_runs would do, from configurations in a folder that is removed again."""
    with tempfile.TemporaryDirectory(prefix="prism-sweep-") as place:
        for run in todo:
            path = config_file(Path(place), run.name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(dump_config(run.config))
        return submit_runs(Path(place), todo, [*options, "--dry-run"], name=name)


def _spell_line(folder: Path, run: StudyRun) -> str:
    config, run_dir = config_file(folder, run.name).absolute(), Path(run.config.run_dir).absolute()
    return shlex.join([str(config), f"run_dir={run_dir}"]) + "\n"


def _submit(path: Path, todo: Sequence[StudyRun], options: Sequence[str]) -> int:
    from launcher import submit

    try:
        return submit.main(["--array", str(path), *options])
    except ValueError as error:
        origin = re.compile(re.escape(str(path)) + r" line (\d+)")
        raise ValueError(origin.sub(lambda found: f"run {todo[int(found[1]) - 1].name}", str(error))) from error
