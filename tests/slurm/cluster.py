"""A real SLURM on this machine: munged, slurmctld and a slurmd for each pretend node, without systemd.

Every node is a host of its own to what runs on it: a UTS, mount and process namespace with its name, which dies whole
when its slurmd is killed. Folders, sockets and ports belong to this cluster alone; everything ends with `stop`, or with
the process that started it.
"""

import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "shellcheck")
PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client", "shellcheck")
START_S = 20.0
# What preemption leaves a job to save, and what the time limit is passed by before it is held to.
GRACE_S, OVER_LIMIT_MIN = 60, 2
CPUS_A_NODE, GPUS_A_NODE = 16, 8


def skip_without_cluster() -> None:
    """Skips where no cluster can run, and fails instead where PRISM_CLUSTER_TESTS=required."""
    reason = find_reason_against()
    if reason is not None and os.environ.get("PRISM_CLUSTER_TESTS") == "required":
        pytest.fail(f"PRISM_CLUSTER_TESTS=required but {reason}; run as root on Debian, or unset it")
    if reason is not None:
        pytest.skip(reason)


def find_reason_against() -> str | None:
    """Why no cluster can run here; None where it can, after installing Debian's packages where they are missing."""
    if os.geteuid() != 0:
        return "a cluster of pretend nodes needs root"
    # Processes of one test run, and test runs beside one another, install once.
    with (Path(tempfile.gettempdir()) / "prism_slurm_install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list_missing():
            return None
        if shutil.which("apt-get") is None:
            return f"neither {', '.join(list_missing())} nor apt-get is here"
        install()
    return None


def list_missing() -> list[str]:
    """The programs of a cluster that this machine has not."""
    return [name for name in PROGRAMS if shutil.which(name, path=_search_path()) is None]


def install() -> None:
    """Debian's packages, without starting their services. Raises CalledProcessError where apt-get fails."""
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *PACKAGES]):
        options = ["-o", "DPkg::Lock::Timeout=300"]
        subprocess.run(["apt-get", *options, *command], env=environ, check=True, stdout=subprocess.DEVNULL, timeout=600)


def find_reason_against_cgroup(folder: Path) -> str | None:
    """Why SLURM cannot follow its jobs' processes by a cgroup v1 freezer here; None where it can."""
    mount_point = folder / "freezer"
    mount_point.mkdir()
    done = subprocess.run(_mount_freezer(mount_point), capture_output=True, text=True)
    if done.returncode != 0:
        return f"proctrack/cgroup needs a cgroup v1 freezer: {done.stderr.strip()}"
    subprocess.run(["umount", mount_point], check=True)
    return None


def _mount_freezer(mount_point: Path) -> list[str]:
    return ["mount", "-t", "cgroup", "-o", "freezer", "cgroup", str(mount_point)]


def _search_path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"


def _find_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """Nodes node1 to nodeN of 16 pretend CPUs and 8 pretend GPUs. Partition `main`, the default, is the first two nodes
    and is left alone; `low` is the same nodes, whose jobs those of `high` preempt; `spare` is all nodes, the later ones
    first.
    """

    def __init__(self, folder: Path, *, nodes: int = 3, proctrack: str = "linuxproc", prefix: str = "node") -> None:
        self.folder = folder
        self.nodes = [f"{prefix}{number}" for number in range(1, nodes + 1)]
        self.proctrack = proctrack
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _search_path()}

    def start(self) -> None:
        """Writes the settings and starts the daemons; raises TimeoutError where they are not idle in START_S."""
        for name in ("state", "spool", "log", "munge"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        if self.proctrack == "cgroup":
            (self.folder / "cgroup" / "freezer").mkdir(parents=True)
            subprocess.run(_mount_freezer(self.folder / "cgroup" / "freezer"), check=True)
        self._write_settings()
        munge = self.folder / "munge"
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={munge / name}" for option, name in files.items()]
        self._spawn("munged", ["munged", "--foreground", "--force", *options])
        _wait_until(lambda: (munge / "socket").exists(), START_S, "munged")
        self._spawn("slurmctld", ["slurmctld", "-D"])
        for node in self.nodes:
            self.start_node(node)
        _wait_until(lambda: self.count_idle() == len(self.nodes), START_S, f"the nodes ({self.folder}/log)")

    def start_node(self, node: str) -> None:
        """A host of its own, with its name."""
        hosts = self.folder / "hosts"
        prepare = f'hostname {node} && mount --bind "{hosts}" /etc/hosts && exec slurmd -D -N {node}'
        namespaces = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._spawn(node, [*namespaces, "bash", "-c", prepare])

    def kill_node(self, node: str) -> None:
        """As if its power were cut: the slurmd and everything on it."""
        process = self._processes.pop(node)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)

    def stop(self) -> None:
        """Ends everything, whatever state it is in."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self._processes.values():
            process.wait(timeout=10)
        self._processes.clear()
        freezer = self.folder / "cgroup" / "freezer"
        if freezer.is_mount():
            for node in self.nodes:
                _remove_groups(freezer / f"slurm_{node}")
            subprocess.run(["umount", "--lazy", freezer], check=True)

    def run(self, *command: str | Path, check: bool = True, **variables: str) -> str:
        """Standard output of a command that sees this cluster; raises AssertionError with its words where it fails."""
        done = subprocess.run(
            [str(part) for part in command],
            env=clean_environ() | self.variables | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if check:
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip() if check else done.stdout + done.stderr

    def count_idle(self) -> int:
        """Nodes that take jobs."""
        states = self.run("sinfo", "-h", "-N", "-p", "spare", "-o", "%T", check=False).split()
        return sum(state in ("idle", "mixed", "allocated") for state in states)

    def show_job(self, job: str) -> dict[str, str]:
        """What scontrol says of a job, by field."""
        words = self.run("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, *states: str, wait_s: float = 120.0) -> dict[str, str]:
        """The job's fields once it is in one of the states."""
        found: dict[str, str] = {}

        def look() -> bool:
            found.update(self.show_job(job))
            return found["JobState"] in states

        _wait_until(look, wait_s, f"job {job} to become {' or '.join(states)}: {found}", interval_s=0.3)
        return found

    def _spawn(self, name: str, command: list[str]) -> None:
        log = (self.folder / "log" / f"{name}.log").open("ab")
        preload = [sys.executable, "-c", _DIE_WITH_PARENT]
        self._processes[name] = subprocess.Popen(
            [*preload, *command],
            env=clean_environ() | self.variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def _write_settings(self) -> None:
        folder, host, first = self.folder, socket.gethostname(), ",".join(self.nodes[:2])
        control, *ports = _find_ports(1 + len(self.nodes))
        lines = [
            f"ClusterName={folder.name.replace('_', '-')}",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={control}",
            # rank 0's port follows from the job's number: those of another cluster on this machine are others.
            f"FirstJobId={random.randrange(1, 19000)}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            "CryptoType=crypto/munge",
            f"AuthInfo=socket={folder}/munge/socket,cred_expire=6",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            f"ProctrackType=proctrack/{self.proctrack}",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "JobRequeue=1",
            "ReturnToService=2",
            "MpiDefault=none",
            "KillWait=30",
            f"OverTimeLimit={OVER_LIMIT_MIN}",
            "SlurmdTimeout=10",
            "InactiveLimit=0",
            "MinJobAge=3600",
            "SlurmdParameters=config_overrides",
            "GresTypes=gpu",
            *(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_A_NODE} "
                f"Gres=gpu:{GPUS_A_NODE} RealMemory=4000 Weight={100 - number}"
                for number, (node, port) in enumerate(zip(self.nodes, ports, strict=True))
            ),
            f"PartitionName=main Nodes={first} Default=YES PriorityTier=10 PreemptMode=OFF State=UP",
            f"PartitionName=low Nodes={first} PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S} State=UP",
            f"PartitionName=high Nodes={first} PriorityTier=20 PreemptMode=OFF State=UP",
            "PartitionName=spare Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP",
        ]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        gpus = folder / "gpus"
        gpus.mkdir()
        for number in range(GPUS_A_NODE):
            os.mknod(gpus / f"gpu{number}", 0o20666, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"Name=gpu File={gpus}/gpu[0-{GPUS_A_NODE - 1}]\n")
        groups = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\nConstrainCores=no\n"
        (folder / "cgroup.conf").write_text(groups)
        names = " ".join([*self.nodes, host])
        (folder / "hosts").write_text(f"127.0.0.1 localhost {names}\n")


def _remove_groups(folder: Path) -> None:
    """A tree of empty control groups, whose files cannot be removed."""
    for path in [*sorted(folder.rglob("*/"), reverse=True), folder]:
        if path.is_dir():
            path.rmdir()


# The daemon's process asks the kernel to end it with its parent, then becomes the daemon.
_DIE_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


def clean_environ() -> Mapping[str, str]:
    """This process's variables without those of a job, a launcher or a test command that it may run under."""
    foreign = ("SLURM", "SBATCH", "PRISM_", "OMP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def _wait_until(is_true: Callable[[], bool], wait_s: float, what: str, *, interval_s: float = 0.1) -> None:
    end_s = time.monotonic() + wait_s
    while not is_true():
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited {wait_s:.0f} s for {what}")
        time.sleep(interval_s)
