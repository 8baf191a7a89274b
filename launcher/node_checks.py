"""What one rank finds on its node before a run: disks, device, commit and packages, as a report for the others."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from launcher.config import RunConfig
from launcher.node_limits import ask_nvidia_smi, count_expected_gpus, list_visible_gpus
from launcher.provenance import ROOT, find_version, read_commit
from launcher.run_data import cache_folder
from launcher.run_folder import find_existing
from prism_lm.model.cost import checkpoint_bytes
from prism_lm.parallel.mesh import Ranks, choose_device
from prism_lm.parallel.rendezvous import name_node

GIB = 2**30
_SIDE = 1024
_FREE_SHARE = 0.8
# NVIDIA's numbers for broken hardware; the others are mostly a program's own fault.
_HARDWARE_XIDS = ("48", "64", "74", "79", "95", "119")
_PACKAGES = ("torch", "triton", "deepspeed", "mosaicml-streaming")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank found; it travels as JSON."""

    node: str
    rank: int
    device: str = "cpu"
    free_device_gib: float | None = None
    "None without a GPU."
    free_disk_gib: dict[str, float] = field(default_factory=dict[str, float])
    facts: dict[str, str] = field(default_factory=dict[str, str])
    "What must be the same on every node."
    problems: list[str] = field(default_factory=list[str])
    "key=value; rule; remedy."


def examine(config: RunConfig, ranks: Ranks, *, min_free_gib: float, enter: Callable[[str], None]) -> Report:
    """Everything that this rank can find without the others. `enter` is told each check before it may hang."""
    problems: list[str] = []
    free_gib: dict[str, float] = {}
    for name, (folder, needed_gib) in list_folders(config, min_free_gib).items():
        enter(f"disk of {name}={folder}")
        free_gib[name] = look_at_folder(name, folder, needed_gib, problems)
    enter(f"data.path={config.data.path}")
    problems += look_at_data(config)
    enter("commit and packages")
    facts = {**describe_code(), **describe_packages()}
    enter("device")
    problems += look_at_devices(ranks)
    device, free_device_gib = ("cpu", None) if problems else look_at_device(ranks, problems)
    return Report(
        node=name_node(),
        rank=ranks.rank,
        device=device,
        free_device_gib=free_device_gib,
        free_disk_gib=free_gib,
        facts=facts,
        problems=problems,
    )


def list_folders(config: RunConfig, min_free_gib: float) -> dict[str, tuple[Path, float]]:
    """The folders that a run writes to, each with the GiB that it must have free: run_dir a checkpoint's more."""
    checkpoint_gib = checkpoint_bytes(config.model, precision=config.train.precision) / GIB
    return {
        "run_dir": (Path(config.run_dir), min_free_gib + checkpoint_gib),
        "data.cache_dir": (cache_folder(config), min_free_gib),
        "TMPDIR": (Path(tempfile.gettempdir()), min_free_gib),
    }


def look_at_folder(name: str, folder: Path, needed_gib: float, problems: list[str]) -> float:
    """GiB free; a folder that is not there yet is looked at where it would be made. Writes and removes a small file."""
    existing = find_existing(folder)
    free_gib = shutil.disk_usage(existing).free / GIB
    if free_gib < needed_gib:
        rule = f"must have {needed_gib:.1f} GiB free but has {free_gib:.1f}"
        problems.append(f"{name}={folder} {rule}; make room there or set {name} to another disk")
        return free_gib
    try:
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        reason = f"must be writable ({error.strerror})"
        problems.append(f"{name}={folder} {reason}; look at its mount, its quota and its owner on this node")
    return free_gib


def look_at_data(config: RunConfig) -> list[str]:
    """Prepared data in a folder must be seen from every node."""
    path = config.data.path
    if not path or "://" in path or (Path(path) / "manifest.json").is_file():
        return []
    return [f"data.path={path} must hold manifest.json; mount that disk on this node too, or give an absolute path"]


def describe_code() -> dict[str, str]:
    """The commit, and a hash of the changes of tracked files; `none` outside a git checkout."""
    commit = read_commit() or "none"
    if not commit.endswith("+changes"):
        return {"commit": commit[:12], "changes": "none"}
    difference = subprocess.run(["git", "diff", "HEAD"], cwd=ROOT, capture_output=True, timeout=60).stdout
    return {"commit": commit[:12], "changes": hashlib.sha256(difference).hexdigest()[:12]}


def describe_packages() -> dict[str, str]:
    """Versions that must be the same on every node."""
    return {"python": platform.python_version(), **{name: find_version(name) or "none" for name in _PACKAGES}}


def look_at_devices(ranks: Ranks) -> list[str]:
    """Whether torch sees the GPUs that this node should have."""
    import torch

    expected, visible = count_expected_gpus(os.environ), list_visible_gpus(os.environ)
    if not expected:
        return []
    shown = min(expected, len(visible)) if visible is not None else expected
    is_bound = os.environ.get("PRISM_GPU_BOUND") == "1"
    needed = 1 if is_bound else max(shown, int(os.environ.get("LOCAL_WORLD_SIZE", ranks.local_rank + 1)))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= needed:
        return []
    rule = f"must be at least {needed}, the GPUs of this node (PRISM_EXPECT_GPUS, SLURM_GPUS_ON_NODE or the ranks)"
    return [f"torch.cuda.device_count()={found} {rule}; look at nvidia-smi there, and for a torch built for CUDA"]


def look_at_device(ranks: Ranks, problems: list[str]) -> tuple[str, float | None]:
    """Name and free memory, GiB, of this rank's device, after a product that it must get right."""
    import torch

    device = choose_device(ranks)
    if device.type == "cpu":
        problems += look_at_product(device.type)
        return "cpu", None
    free, total = torch.cuda.mem_get_info(device)
    if free < _FREE_SHARE * total:
        rule = f"must have {_FREE_SHARE * total / GIB:.0f} GiB of memory free but has {free / GIB:.0f}"
        problems.append(f"{device} {rule}; end the other process that nvidia-smi lists there")
    try:
        problems += look_at_product(str(device))
    except RuntimeError as error:
        problems.append(
            f"{device} must multiply matrices ({str(error).splitlines()[0]}); reset that GPU or leave it out"
        )
    problems += look_at_errors(str(torch.cuda.get_device_properties(device).uuid))
    return torch.cuda.get_device_name(device), free / GIB


def look_at_product(device: str) -> list[str]:
    """Small whole numbers, so that every precision gives the same product."""
    import torch

    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-4, 5, (_SIDE, _SIDE), generator=generator).float() for _ in range(2))
    product = (left.to(device) @ right.to(device)).cpu()
    wrong = int((product != (left.double() @ right.double()).float()).sum())
    if not wrong:
        return []
    return [f"{device} must multiply exactly but got {wrong} of {_SIDE * _SIDE} sums wrong; leave that node out"]


def look_at_errors(uuid: str) -> list[str]:
    """Memory errors and rows waiting to be replaced, as nvidia-smi counts them, and hardware errors in the kernel log.
    Empty where these tools give no answer."""
    memory = ask_nvidia_smi("--query-gpu=uuid,ecc.errors.uncorrected.volatile.total")
    rows = ask_nvidia_smi("--query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure")
    found = [("uncorrected ECC errors", count) for name, count in memory if uuid in name]
    found += [("rows to be remapped", pending) for name, pending, _ in rows if uuid in name]
    found += [("failed row remaps", failed) for name, _, failed in rows if uuid in name]
    found += [(f"hardware errors (Xid {xid}) in the last hour", "1") for xid in find_xids()]
    rule = "must be 0; reset the GPU (nvidia-smi -r, an administrator) or leave that node out"
    return [
        f"{what}={count} of GPU {uuid[:12]} {rule}" for what, count in found if count not in ("0", "No", "[N/A]", "N/A")
    ]


def find_xids() -> list[str]:
    """Numbers of hardware errors that the kernel noted in the last hour, where its log may be read."""
    try:
        done = subprocess.run(["dmesg", "--since", "1 hour ago"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in done.stdout.splitlines() if "NVRM: Xid" in line]
    return [xid for xid in _HARDWARE_XIDS if any(f": {xid}," in line for line in lines)]
