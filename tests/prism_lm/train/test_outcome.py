"""result.json says how a run ended, once."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from prism_lm.parallel.collectives import RunFailed
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.config import TrainConfig
from prism_lm.train.lineage import read_lineage
from prism_lm.train.outcome import Ending, read_status, reporting, write_failure, write_start
from prism_lm.train.state import TrainRun, TrainState
from tests.harness import build_run


def build_ending() -> Ending:
    return Ending(state=TrainState(step=4, tokens=400), losses={"train/loss_nats": 1.5})


def read_result(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "result.json").read_text())


def of_rank(run: TrainRun, rank: int) -> TrainRun:
    return replace(run, ranks=Ranks(rank=rank, world_size=2))


def test_ending_is_written_with_its_figures(tmp_path: Path) -> None:
    ending = build_ending()
    with reporting(build_run(tmp_path, TrainConfig()), ending):
        ending.status = "finished"
    result = read_result(tmp_path)
    assert (result["status"], result["step"], result["tokens"], result["error"]) == ("finished", 4, 400, None)
    assert result["train/loss_nats"] == 1.5


def test_first_rank_to_fail_is_believed(tmp_path: Path) -> None:
    run = build_run(tmp_path, TrainConfig())
    with pytest.raises(OSError), reporting(of_rank(run, 1), build_ending()):
        raise OSError("no space left")
    with pytest.raises(ConnectionError), reporting(of_rank(run, 0), build_ending()):
        raise ConnectionError("lost a partner")
    assert (read_result(tmp_path)["status"], read_result(tmp_path)["error"]) == ("failed", "no space left")
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "lineage.jsonl"}
    assert [line["error"] for line in read_lineage(tmp_path)] == ["no space left"]


def test_error_that_all_ranks_share_is_written_by_rank_0(tmp_path: Path) -> None:
    run = build_run(tmp_path, TrainConfig())
    with pytest.raises(RunFailed), reporting(of_rank(run, 1), build_ending()):
        raise RunFailed("a shard is truncated")
    assert read_status(tmp_path) is None


def test_start_removes_the_former_result_and_keeps_its_cause(tmp_path: Path) -> None:
    run = replace(build_run(tmp_path, TrainConfig()), files={"tokenizer.model": b"\x00\xff"})
    write_start(run, TrainState())
    with reporting(run, build_ending()):
        pass
    assert read_status(tmp_path) == "preempted"
    write_start(run, TrainState(step=4))
    write_start(run, TrainState(step=4))
    lines = read_lineage(tmp_path)
    assert [(line["event"], line["step"], line.get("former_end"), line.get("resumed_from")) for line in lines] == [
        ("start", 0, None, None),
        ("end", 4, None, None),
        ("resume", 4, "preempted", "step_4"),
        ("resume", 4, "killed", "step_4"),
    ]
    assert lines[1]["status"] == "preempted"
    assert read_status(tmp_path) is None
    assert (tmp_path / "config.yaml").read_text() == run.config_yaml
    assert json.loads((tmp_path / "environment.json").read_text()) == {"python": "3"}
    assert (tmp_path / "tokenizer.model").read_bytes() == b"\x00\xff"


def test_ending_cut_short_by_a_kill_does_not_silence_the_next(tmp_path: Path) -> None:
    run = build_run(tmp_path, TrainConfig())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("prism_lm.train.outcome.write_json", raise_exit)
        with reporting(run, build_ending()):
            pass
    assert read_status(tmp_path) is None
    write_start(run, TrainState(step=4))
    with reporting(run, build_ending()):
        pass
    assert read_status(tmp_path) == "preempted"


def test_start_says_on_what_it_runs_and_what_the_former_one_failed_of(tmp_path: Path) -> None:
    environment = {"commit": "3052b82", "slurm_job_id": 71, "slurm_restart_count": 2}
    run = replace(build_run(tmp_path, TrainConfig(zero_stage=2)), environment=environment)
    write_start(run, TrainState())
    write_failure(tmp_path, build_ending(), "a shard is truncated")
    write_failure(tmp_path, build_ending(), "lost a partner")
    ranks = Ranks(world_size=4, sequence_degree=2)
    write_start(replace(run, ranks=ranks), TrainState(step=0), tmp_path / "checkpoints" / "step_0")
    start, end, resume = read_lineage(tmp_path)
    assert (start["commit"], start["slurm_job_id"], start["slurm_restart_count"]) == ("3052b82", 71, 2)
    assert (start["event"], end["event"], end["error"]) == ("start", "end", "a shard is truncated")
    assert (resume["event"], resume["resumed_from"], resume["former_error"]) == ("resume", "step_0", end["error"])
    places = ("world_size", "data_degree", "sequence_degree", "zero_stage")
    assert [resume[name] for name in places] == [4, 2, 2, 2]
    assert resume["host"] and resume["time"] and len(resume["config_sha256"]) == 64


def test_start_that_lost_the_folder_writes_no_ending_there(tmp_path: Path) -> None:
    run, ending = build_run(tmp_path, TrainConfig()), build_ending()
    ending.check_owner = raise_lost
    with pytest.raises(RunFailed, match="took this run over"), reporting(run, ending):
        pass
    with pytest.raises(OSError, match="no space left"), reporting(run, ending):
        raise OSError("no space left")
    assert list(tmp_path.iterdir()) == []


def raise_lost() -> None:
    raise RunFailed("another start took this run over")


def test_record_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    run = build_run(tmp_path / "absent", TrainConfig())
    with pytest.raises(RuntimeError, match="the real cause") as raised, reporting(run, build_ending()):
        raise RuntimeError("the real cause")
    assert "do not tell this ending" in raised.value.__notes__[0]


def raise_exit(path: Path, value: object) -> None:
    raise SystemExit
