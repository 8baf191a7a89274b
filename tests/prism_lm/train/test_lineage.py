"""lineage.jsonl survives kills, and tells the starts of a run from its endings."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_lm.train.lineage import (
    append_line,
    count_starts,
    describe_former_end,
    parse_lines,
    read_lineage,
    read_result,
)

STARTED = {"event": "start", "step": 0}
RESUMED = {"event": "resume", "step": 4, "former_error": "größe\n2"}


@given(cut=st.integers(min_value=0, max_value=200))
def test_line_cut_short_anywhere_costs_itself_alone(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("run") / "lineage.jsonl"
    append_line(path, STARTED)
    first = path.read_bytes()
    append_line(path, RESUMED)
    path.write_bytes(path.read_bytes()[: len(first) + cut])
    whole_before = read_lineage(path.parent)
    append_line(path, {"event": "end"})
    assert read_lineage(path.parent) == [*whole_before, {"event": "end"}]
    assert whole_before[0] == STARTED and whole_before[1:] in ([], [RESUMED])


def test_lines_that_hold_no_object_are_left_out() -> None:
    assert parse_lines(b'{"a": 1}\n\n[2]\n\xff\xfe\n{"b": \n{"c": 3}') == [{"a": 1}, {"c": 3}]


def test_run_that_never_started_has_neither_lineage_nor_former_end(tmp_path: Path) -> None:
    assert read_lineage(tmp_path) == [] and count_starts(tmp_path) == 0 and read_result(tmp_path) is None
    assert describe_former_end(tmp_path) == {"former_end": None, "former_error": None}


def write_result(run_dir: Path, **result: object) -> None:
    (run_dir / "result.json").write_text(json.dumps(result))


def test_start_killed_before_it_ended_is_not_given_the_result_of_the_one_before(tmp_path: Path) -> None:
    append_line(tmp_path / "lineage.jsonl", STARTED)
    assert describe_former_end(tmp_path) == {"former_end": "killed", "former_error": None}
    write_result(tmp_path, status="failed", error="no space left", starts=1)
    append_line(tmp_path / "lineage.jsonl", {"event": "end"})
    assert describe_former_end(tmp_path) == {"former_end": "failed", "former_error": "no space left"}
    append_line(tmp_path / "lineage.jsonl", RESUMED)
    assert read_result(tmp_path) is None
    assert describe_former_end(tmp_path) == {"former_end": "killed", "former_error": None}


def test_first_start_killed_in_its_own_line_counts_as_killed(tmp_path: Path) -> None:
    (tmp_path / "lineage.jsonl").write_text('{"event": "sta')
    assert describe_former_end(tmp_path)["former_end"] == "killed"


def test_damaged_result_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result\.json must hold JSON; .*; remove the file"):
        read_result(tmp_path)


def test_lineage_is_read_without_torch() -> None:
    program = "import sys, prism_lm.train.lineage; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
