"""`prism doctor`: what this machine has, what it lacks, and what that means for a run."""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GIB = 2**30
Verdict = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at: its state, and what follows from it. `fail` alone makes the exit code 1."""

    verdict: Verdict
    subject: str
    state: str
    meaning: str = ""


def main(arguments: list[str]) -> int:
    """Print every finding; 1 if something that training needs is missing, otherwise 0."""
    build_parser().parse_args(arguments)
    findings = list(examine())
    for finding in findings:
        meaning = f"  -> {finding.meaning}" if finding.meaning else ""
        print(f"{finding.verdict:<5} {finding.subject:<14} {finding.state}{meaning}")
    failed = [finding.subject for finding in findings if finding.verdict == "fail"]
    print(f"\n{'not ready: ' + ', '.join(failed) if failed else 'ready'}")
    return 1 if failed else 0


def build_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog="prism doctor", description=__doc__)


def examine() -> Iterator[Finding]:
    """Every finding, cheap ones first."""
    yield _examine_python()
    for package in ("torch", "triton", "deepspeed", "mosaicml-streaming", "sentencepiece", "omegaconf", "tensorboard"):
        yield _examine_package(package)
    yield from _examine_accelerator()
    yield _examine_compiler()
    yield _examine_disk(Path.cwd())
    yield _examine_shared_memory()
    yield _examine_slurm()


def _examine_python() -> Finding:
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return Finding("ok", "python", f"{platform.python_version()} on {machine}")


def _examine_package(name: str) -> Finding:
    try:
        return Finding("ok", name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding("fail", name, "not installed", "run `pip install -e . -c constraints.txt` in this environment")


def _examine_accelerator() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("fail", "torch import", str(error), "reinstall torch for this machine")
        return
    if not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA"
        yield Finding("note", "cuda", f"no device (torch built for {built})", "training runs on the CPU through gloo")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding("ok", f"cuda:{index}", f"{name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free")
    from torch.cuda import nccl

    version = ".".join(str(part) for part in nccl.version())
    yield Finding("ok", "cuda, nccl", f"{torch.version.cuda}, {version}")


def _examine_compiler() -> Finding:
    compiler = shutil.which("c++") or shutil.which("g++")
    if not compiler:
        return Finding("note", "compiler", "no c++ on PATH", "parallel.compile needs one: apt-get install g++")
    return Finding("ok", "compiler", compiler)


def _examine_disk(folder: Path) -> Finding:
    free_gib = shutil.disk_usage(folder).free / GIB
    if free_gib < 1:
        return Finding("fail", "disk", f"{free_gib:.1f} GiB free in {folder}", "checkpoints need room: free some")
    return Finding("ok", "disk", f"{free_gib:.0f} GiB free in {folder}")


def _examine_shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding("fail", "shared memory", "no /dev/shm", "the data loader needs it: mount a tmpfs there")
    free_gib = shutil.disk_usage("/dev/shm").free / GIB
    if free_gib < 0.1:
        return Finding("fail", "shared memory", f"{free_gib:.2f} GiB free", "in a container: --shm-size=1g or more")
    return Finding("ok", "shared memory", f"{free_gib:.1f} GiB free in /dev/shm")


def _examine_slurm() -> Finding:
    if not shutil.which("sinfo"):
        return Finding("note", "slurm", "not found", "start with `prism train` or torchrun")
    try:
        answer = subprocess.run(["sinfo", "--version"], capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return Finding("note", "slurm", "sinfo did not answer within 10 s", "its controller may be down")
    inside = os.environ.get("SLURM_JOB_ID")
    return Finding("ok", "slurm", answer.stdout.strip() + (f", inside job {inside}" if inside else ""))
