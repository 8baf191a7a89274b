"""`prism bench` on the tiny config: what it prints, what belongs to which CONFIG, what it refuses."""

import json
from pathlib import Path

import pytest

from launcher.__main__ import EXIT_USAGE, main
from launcher.bench import read_requested
from prism_lm.train.bench_peer import is_installed

CONFIGS = Path(__file__).parent.parent.parent / "configs" / "train"
SHORT = ["model.num_layers=1", "--batch", "1x48", "2x32", "--steps", "2", "--warmup-steps", "1"]


def test_each_candidate_is_timed_at_each_batch_and_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(CONFIGS / "tiny.yaml"), *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("device ") and "torch" in lines[0]
    result = json.loads(lines[-1])
    assert [(row["rows"], row["row_tokens"]) for row in result["timings"]] == [(1, 48), (2, 32)]
    for row in result["timings"]:
        speed, step = row["tokens_per_s"], row["step_ms"]
        assert 0 < speed["p20"] <= speed["p50"] <= speed["p80"]
        assert speed["p50"] == pytest.approx(1e3 * row["rows"] * row["row_tokens"] / step["p50"])
        assert 5 < row["loss_nats"] < 10


def test_keys_change_the_config_before_them_and_no_other() -> None:
    tiny, other = str(CONFIGS / "tiny.yaml"), str(CONFIGS / "tiny-gated_delta.yaml")
    first, second = read_requested([tiny, "model.num_layers=2", other])
    assert (first.config.model.num_layers, second.config.model.num_layers) == (2, 3)
    assert first.name == "tiny model.num_layers=2" and second.config.model.mixer == "gated_delta"


@pytest.mark.skipif(is_installed(), reason="the peer is there, and would be timed")
def test_absent_peer_is_named_and_the_rest_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    widths = ["model.model_width=1024", "model.mlp_width=64"]
    assert main(["bench", str(CONFIGS / "tiny.yaml"), *widths, *SHORT, "--peer", "fla_gated_delta"]) == 0
    out = capsys.readouterr().out
    assert "fla_gated_delta: absent" in out and len(json.loads(out.splitlines()[-1])["timings"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.num_layers=1"], "model.num_layers=1 must come after the CONFIG it changes"),
        ([str(CONFIGS / "tiny.yaml"), "--batch", "16"], "--batch=16 must be ROWSxTOKENS"),
        ([str(CONFIGS / "tiny.yaml"), "--steps", "0"], "--steps=0"),
        ([str(CONFIGS / "tiny.yaml"), "--limit-s", "0"], "--limit-s=0 must be above 0"),
        ([str(CONFIGS / "tiny.yaml"), "--out", "/dev/null/bench"], "--out=/dev/null/bench must be a folder"),
        ([str(CONFIGS / "tiny.yaml"), "--peer", "fla_gated_delta"], "model.model_width=192 must have a size"),
    ],
)
def test_what_cannot_be_timed_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"error: {words}")


def test_model_that_meets_the_limit_is_timed_by_one_step_and_left_out_at_longer_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model.num_layers=1", "--batch", "1x48", "2x96", "1x32", "--limit-s", "1e-6", "--steps", "3"]
    assert main(["bench", str(CONFIGS / "tiny.yaml"), *words, "--out", str(tmp_path / "kept")]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    first, longer, shorter = printed["timings"]
    assert first["met_limit"] and first["step_ms"]["p20"] == first["step_ms"]["p80"]
    assert longer["why_absent"].startswith("not timed: a step of 1x48 took ") and "tokens_per_s" not in longer
    assert shorter["tokens_per_s"]["p50"] > 0
    kept = json.loads((tmp_path / "kept" / "bench.json").read_text())
    assert kept["timings"] == printed["timings"] and kept["command"].startswith("prism bench ")
    table = (tmp_path / "kept" / "bench.md").read_text()
    assert "| 2 x 96 | not timed: a step of 1x48 took " in table and "| 1 x 32 |" in table


def test_steps_are_as_many_as_asked_for_where_no_limit_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(CONFIGS / "tiny.yaml"), *SHORT, "--limit-s", "600"]) == 0
    assert not any(row["met_limit"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])["timings"])
