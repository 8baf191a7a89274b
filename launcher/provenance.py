"""What a run's figures were obtained with: commit, packages, hardware; written to `environment.json`."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.environment import ProcessEnvironment

ROOT = Path(__file__).parent.parent
PACKAGES = ("prism-lm", "torch", "triton", "deepspeed", "mosaicml-streaming", "sentencepiece", "omegaconf", "numpy")


def describe_environment(environment: ProcessEnvironment) -> dict[str, Any]:
    """A JSON object; a package or tool that is absent is written as null."""
    return {
        "commit": read_commit(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "launcher": environment.launcher,
        "world_size": environment.ranks.world_size,
        "python": platform.python_version(),
        "packages": {name: find_version(name) for name in PACKAGES},
        "host": platform.node(),
        "cores": os.cpu_count(),
        "gpus": _list_gpus(),
        **describe_job(os.environ),
    }


def describe_job(environ: Mapping[str, str]) -> dict[str, int]:
    """SLURM's number of the job and how often it was restarted (0 in its first run); empty outside SLURM."""
    if "SLURM_JOB_ID" not in environ:
        return {}
    restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
    return {"slurm_job_id": int(environ["SLURM_JOB_ID"]), "slurm_restart_count": restarts}


def read_commit() -> str | None:
    """The commit of this source tree, with `+changes` where files differ from it; null outside a git checkout."""
    commit = _git("rev-parse", "HEAD")
    return commit and commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def find_version(package: str) -> str | None:
    """The installed version; null where the package is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _list_gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
