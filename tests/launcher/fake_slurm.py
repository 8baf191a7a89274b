"""Small programs in place of SLURM's: they answer from files, in the formats of the real ones, and note how they were
called. Nothing else named like SLURM is on PATH."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

BASH = shutil.which("bash")
TOOLS = ("bash", "git", "sed", "cat", "grep", "env", "sleep", "mkdir", "touch", "date")
# sinfo --format='%P|%a|%l|%s|%D|%c|%G'
PARTITIONS = (
    "gpu*|up|1-00:00:00|1-4|6|64|gpu:h100:8(S:0-1)",
    "gpu*|up|1-00:00:00|1-4|2|32|gpu:a100:4",
    "cpu|up|infinite|1-infinite|3|4|(null)",
    "old|down|infinite|1-infinite|3|4|(null)",
)
SQUEUE = """\
for argument in "$@"; do
    case $argument in --jobs=*) ids=${argument#--jobs=} ;; --me) ids=mine ;; esac
done
if [[ $ids == mine ]]; then cat "$here/mine"; exit 0; fi
found=0
while IFS= read -r line; do
    for id in ${ids//,/ }; do [[ $line == "$id|"* ]] && { echo "$line"; found=1; }; done
done < <(cat "$here/mine" "$here/others")
[[ $found == 1 || $ids == *,* ]] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
"""
SBATCH = """\
echo "SBATCH_TIMELIMIT=${SBATCH_TIMELIMIT-unset}" >> "$here/sbatch.env"
number=$(($(cat "$here/number") + 1))
[[ ! -f $here/refuse_from || $number -lt $(cat "$here/refuse_from") ]] || {
    echo "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified" >&2
    exit 1
}
echo "$number" > "$here/number"
echo "$number;cluster"
"""


@dataclass
class FakeSlurm:
    """The files that the programs answer from, in `folder`."""

    folder: Path
    bin: Path = field(init=False)

    def __post_init__(self) -> None:
        self.bin = self.folder / "bin"
        self.bin.mkdir(parents=True)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)

    def install(self) -> None:
        """A cluster with an empty queue."""
        (self.folder / "number").write_text("100\n")
        self.set_queue()
        (self.folder / "partitions").write_text("".join(f"{line}\n" for line in PARTITIONS))
        self.write_program("squeue", SQUEUE)
        self.write_program("sinfo", 'cat "$here/partitions"\n')
        self.write_program("sbatch", SBATCH)

    def write_program(self, name: str, body: str) -> None:
        head = f'#!{BASH}\nhere="{self.folder}"\nprintf "%s\\n" "$*" >> "$here/{name}.calls"\n'
        (self.bin / name).write_text(head + body)
        (self.bin / name).chmod(0o755)

    def set_queue(self, *mine: str, others: tuple[str, ...] = ()) -> None:
        """Lines of squeue --format='%i|%A|%T|%r|%N|%D|%L|%P|%j|%k'."""
        (self.folder / "mine").write_text("".join(f"{line}\n" for line in mine))
        (self.folder / "others").write_text("".join(f"{line}\n" for line in others))

    def read_calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.is_file() else []


def put_on_path(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the fakes, and the tools they need."""
    monkeypatch.setenv("PATH", str(fake.bin))
    for name in os.environ:
        if name.startswith(("SBATCH_", "SLURM_")):
            monkeypatch.delenv(name)
