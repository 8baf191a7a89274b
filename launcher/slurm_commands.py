"""Asking SLURM's commands, sbatch among them: every question has a time limit, and no answer is one line."""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

ASK_S = 20.0
# Choose lines and columns, or are a job's own where this runs in one: sbatch would hand them on to the next.
_DROPPED = re.compile("SQUEUE_|SINFO_|SACCT_|SLURM_")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")


class SlurmError(RuntimeError):
    """A SLURM command refused, or gave no answer."""


class SlurmAbsent(SlurmError):
    """This machine is not a login node of a cluster."""


def ask(command: str, *arguments: str, without: Sequence[str] = ()) -> str:
    """Standard output of a command that sees none of the variables `without`. Raises SlurmError, SlurmAbsent."""
    dropped = (*without, *(name for name in os.environ if _DROPPED.match(name) and name not in _KEPT))
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    try:
        done = subprocess.run(
            [command, *arguments], env=environ, capture_output=True, text=True, errors="replace", timeout=ASK_S
        )
    except (FileNotFoundError, PermissionError) as error:
        raise SlurmAbsent(_explain_absence(f"{command} is not on PATH")) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"{command} must answer within {ASK_S:.0f} s; SLURM's controller may be down: see `scontrol ping`"
        ) from error
    if done.returncode == 0:
        return done.stdout
    words = done.stderr.strip() or done.stdout.strip()
    if "configuration source" in words:
        raise SlurmAbsent(_explain_absence(f"{command} finds no slurm.conf"))
    raise SlurmError(
        f"{command} must end with 0, not {done.returncode}; it said: {_shorten(words)}{_find_remedy(words)}"
    )


def submit_script(script: Path, *, dependency: str | None = None, ignored: Sequence[str] = ()) -> str:
    """Hands the script to sbatch; returns the job's number. Raises SlurmError with sbatch's own words.

    `ignored` are SBATCH_* variables that would overrule the script's own lines.
    """
    options = [f"--dependency={dependency}"] if dependency else []
    answer = ask("sbatch", "--parsable", *options, str(script), without=ignored)
    job_id = answer.strip().splitlines()[-1].partition(";")[0] if answer.strip() else ""
    if not job_id.isdigit():
        raise SlurmError(
            f"sbatch must answer with a job's number, not {answer.strip()!r}; look for the job with squeue"
        )
    return job_id


def _find_remedy(words: str) -> str:
    is_silent = "Unable to contact" in words or "timed out" in words
    return "; SLURM's controller may be down: see `scontrol ping`" if is_silent else ""


def _explain_absence(reason: str) -> str:
    return f"SLURM must be at hand, but {reason}; run this on a cluster's login node, or use `prism train` or torchrun"


def _shorten(words: str) -> str:
    lines = [re.sub(r"^\w+: (error|fatal): ", "", line) for line in words.splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "nothing"
