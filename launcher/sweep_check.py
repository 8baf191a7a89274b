"""What `prism train` would refuse of a study's runs, found before the first of them starts."""

from collections.abc import Sequence
from pathlib import Path

from launcher.job_request import Request
from launcher.run_checks import check_folder_can_be_made, check_room, check_run
from launcher.sweep_folder import StudyRun, raise_problems


def check_runs(runs: Sequence[StudyRun]) -> list[str]:
    """Warnings. Raises ValueError with every mistake once, and the runs that have it: settings, data, tokenizer, the
    checkpoint to go on from, room on the disk."""
    import torch

    from data_pipeline.errors import DataError

    request = Request(nodes=1, ranks_per_node=1, gpus_per_node=int(torch.cuda.is_available()), time_s=0)
    warnings: dict[str, None] = {}
    problems: dict[str, list[str]] = {}
    for run in runs:
        try:
            check_folder_can_be_made(Path(run.config.run_dir))
            said = [check_room(run.config), check_run(run.config, request)]
            warnings |= {f"run {run.name}: {warning}": None for warning in said if warning}
        except (ValueError, DataError) as error:
            problems.setdefault(str(error), []).append(run.name)
    raise_problems(problems)
    if any(not run.config.train.eval_every_steps for run in runs):
        warnings["train.eval_every_steps=0 leaves runs without a validation loss, and the table without them"] = None
    return list(warnings)
