"""What this process may use of its node: CPU threads, GPUs as its launcher shows them, the network interface."""

import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Mapping

_SIOCGIFADDR = 0x8915


def count_threads(environ: Mapping[str, str], local_world_size: int) -> str | None:
    """OMP_NUM_THREADS for one of this node's ranks; None leaves the choice to the libraries, for a rank that has the
    node to itself. A task's affinity mask may be the node's, which its ranks share, or its own."""
    per_task = int(environ.get("SLURM_CPUS_PER_TASK") or "0")
    if per_task and "SLURM_STEP_ID" in environ:
        ranks_per_task = local_world_size if "RANK" in environ else 1
        return str(max(1, per_task // ranks_per_task))
    if local_world_size == 1:
        return None
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    node = int(environ.get("SLURM_CPUS_ON_NODE") or mask)
    return str(max(1, min(mask, node // local_world_size)))


def list_visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES; None where it is not set, which shows all GPUs of the node."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    return [name.strip() for name in text.split(",") if name.strip() not in ("", "NoDevFiles", "-1")]


def count_slurm_gpus(environ: Mapping[str, str]) -> int | None:
    """GPUs that SLURM gave this step on this node; None where it does not say."""
    if environ.get("SLURM_GPUS_ON_NODE"):
        return int(environ["SLURM_GPUS_ON_NODE"])
    if environ.get("SLURM_STEP_GPUS"):
        return len(environ["SLURM_STEP_GPUS"].split(","))
    return None


def is_gpu_bound(environ: Mapping[str, str], local_world_size: int) -> bool:
    """Whether srun shows this task GPUs of its own, which it counts from 0, rather than all those of its node's ranks.
    Fewer visible GPUs than ranks are that only where the step holds enough of them."""
    visible = list_visible_gpus(environ)
    if not visible or len(visible) >= local_world_size:
        return False
    asked = "SLURM_GPUS_PER_TASK" in environ or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    return asked or (count_slurm_gpus(environ) or 0) >= local_world_size


def find_gloo_interface(address: str, port: int) -> str | None:
    """The interface towards rank 0, where this host's own name means a loopback address or none, which gloo would then
    tell ranks on other nodes; None where the name will do, or where rank 0 is reached by loopback itself."""
    if not _is_loopback(socket.gethostname()) or _is_loopback(address):
        return None
    mine = _find_own_address(address, port)
    return next((name for _, name in socket.if_nameindex() if mine and _read_address(name) == mine), None)


def _find_own_address(address: str, port: int) -> str | None:
    """This host's address on the way there; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))
            return probe.getsockname()[0]
    except OSError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return True


def _read_address(interface: str) -> str | None:
    """The interface's IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def count_expected_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that this node should offer the run: PRISM_EXPECT_GPUS, else what SLURM gave, else those that are visible.

    Raises ValueError for a PRISM_EXPECT_GPUS that is no number.
    """
    text = environ.get("PRISM_EXPECT_GPUS", "")
    if text and not text.isdecimal():
        raise ValueError(
            f"PRISM_EXPECT_GPUS={text} must be a number of GPUs on each node; for example 8, or 0 for none"
        )
    if text:
        return int(text)
    given, visible = count_slurm_gpus(environ), list_visible_gpus(environ)
    if given is not None:
        return given
    return len(visible) if visible is not None else len(ask_nvidia_smi("--query-gpu=index"))


def ask_nvidia_smi(query: str, *more: str) -> list[list[str]]:
    """One row of values a GPU; empty where the tool is absent, does not know the query or gives no answer in 30 s."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = done.stdout.splitlines() if done.returncode == 0 else []
    return [[value.strip() for value in row.split(",")] for row in rows if row.strip()]
