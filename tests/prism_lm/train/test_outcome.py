"""result.json says how a run ended, once."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from prism_lm.parallel.collectives import RunFailed
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.config import TrainConfig
from prism_lm.train.outcome import Ending, read_status, reporting, write_start
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
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


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
    lines = [json.loads(line) for line in (tmp_path / "lineage.jsonl").read_text().splitlines()]
    assert [(line["event"], line["step"], line["former_end"]) for line in lines] == [
        ("start", 0, None),
        ("resume", 4, "preempted"),
        ("resume", 4, "killed"),
    ]
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


def raise_exit(path: Path, value: object) -> None:
    raise SystemExit
