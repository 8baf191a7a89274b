"""The records of a run's starts and endings, read and written without torch.

`lineage.jsonl` has a line for each start (event `start` or `resume`) and each ending (event `end`), oldest first.
`result.json` holds the ending of the newest start; it is absent while that one runs and after it was killed.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from prism_lm.checkpoint.folder import read_json

RESULT_NAME = "result.json"
LINEAGE_NAME = "lineage.jsonl"


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Adds one line of JSON and forces it to the disk. A last line that a kill cut short is ended first, so that it
    stays a line of its own. One process at a time."""
    with path.open("ab+") as file:
        line = json.dumps(dict(value)).encode() + b"\n"
        if _is_cut_short(file.fileno()):
            line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _is_cut_short(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def parse_lines(content: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines, in order; a line that is none, such as one cut short, is left out."""
    parsed: list[dict[str, Any]] = []
    for line in content.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            parsed.append(cast(dict[str, Any], value))
    return parsed


def read_lineage(run_dir: Path) -> list[dict[str, Any]]:
    """Every whole line of the run's lineage, oldest first; empty where the run never started."""
    path = run_dir / LINEAGE_NAME
    return parse_lines(path.read_bytes()) if path.is_file() else []


def count_starts(run_dir: Path) -> int:
    """How many starts the run's lineage holds."""
    return sum(line.get("event") != "end" for line in read_lineage(run_dir))


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """How the run's newest start ended: what result.json holds. None where it left no ending: it runs, or was killed.

    A result of an earlier start, which a kill kept a later one from removing, is not taken for it. Raises ValueError
    for a damaged file.
    """
    path = run_dir / RESULT_NAME
    if not path.is_file():
        return None
    result = cast(dict[str, Any], read_json(path, remedy="remove the file"))
    starts = count_starts(run_dir)
    return result if result.get("starts", starts) >= starts else None


def describe_former_end(run_dir: Path) -> dict[str, str | None]:
    """Why the start before this one ended: `former_end`, its status (finished, preempted, failed, or killed where it
    left no ending), and `former_error`, its error's words. Both None for the first start."""
    path = run_dir / LINEAGE_NAME
    result = read_result(run_dir)
    if result is not None:
        return {"former_end": result["status"], "former_error": result.get("error")}
    return {"former_end": "killed" if path.is_file() and path.stat().st_size else None, "former_error": None}
