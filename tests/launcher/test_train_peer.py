"""A layer of another library, a small one in its place here, through the command line: training, resuming, refusals."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from data_pipeline.synthetic import write_synthetic_dataset
from launcher.__main__ import EXIT_USAGE, main
from launcher.config import RunConfig, dump_config, fingerprint_model, load_config
from launcher.curves import read_metrics
from prism_lm.model.config import ModelConfig
from tests.harness import run_on
from tests.prism_lm.model.fake_peers import fake_peers

CONFIG = Path(__file__).parent.parent.parent / "configs" / "train" / "tiny.yaml"
STEPS = 8
PEER = ("model.mixer=peer", "model.peer_layer=FakeDelta", "model.peer_options.num_householder=2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    return write_synthetic_dataset(folder, vocab_size=320, row_tokens=64, documents=200, seed=0)


def build_arguments(run_dir: Path, data: Path, *extra: str) -> list[str]:
    keys = [f"run_dir={run_dir}", f"data.path={data}", "data.row_tokens=64", "model.vocab_size=320"]
    training = [f"train.steps={STEPS}", "train.schedule.warmup_steps=1", "train.log_every_steps=1"]
    return ["train", str(CONFIG), *keys, *training, "train.eval_every_steps=4", "train.eval_rows=8", *PEER, *extra]


def call_with_peers(*commands: list[str]) -> list[int]:
    """Exit codes of commands, one after another, where the layers' package is there."""
    with fake_peers():
        return [main(command) for command in commands]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_peer_learns_saves_and_resumes_at_that_stage(data: Path, tmp_path: Path, stage: int) -> None:
    run_dir = tmp_path / "run"
    arguments = build_arguments(run_dir, data, f"train.zero_stage={stage}")
    assert run_on(1, call_with_peers, arguments, [*arguments, f"train.steps={STEPS + 2}"]) == [[0, 0]]
    lines = read_metrics(run_dir)
    losses = [line["train/loss_nats"] for line in lines]
    assert len(losses) == STEPS + 2 and losses[-1] < losses[0] - 0.1
    weights = load_file(run_dir / "checkpoints" / f"step_{STEPS + 2}" / "model.safetensors")
    assert "blocks.2.mixer.peer.o_proj.bias" in weights
    held = load_config(RunConfig, run_dir / "config.yaml").model
    assert (held.peer_layer, held.peer_options) == ("FakeDelta", {"num_householder": 2})


def test_a_trained_peer_is_evaluated_and_neither_continued_nor_exported(data: Path, tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    commands = [
        build_arguments(run_dir, data, "train.steps=2"),
        ["evaluate", str(run_dir), "--split", "validation"],
        ["generate", str(run_dir), "--prompt", "a", "--max-new-tokens", "2"],
        ["export", str(run_dir), str(out)],
    ]
    assert run_on(1, call_with_peers, *commands) == [[0, 0, EXIT_USAGE, EXIT_USAGE]]
    (file,) = (run_dir / "evaluations").glob("validation_*.json")
    assert json.loads(file.read_text())["num_tokens"] > 0
    assert not out.exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parallel.sequence_degree=2", "parallel.sequence_degree=2 must be 1 for model.mixer=peer"),
        ("model.peer_layer=''", "model.peer_layer= must name a layer of flash-linear-attention"),
        ("model.mixer=prism", "model.peer_layer=FakeDelta must go with model.mixer=peer"),
        ("model.peer_layer=FakeDelt", "model.peer_layer=FakeDelt must be a layer of flash-linear-attention; use Fake"),
        ("model.peer_options.heads=2", "model.peer_options.heads=2 must be an argument of FakeDelta; use"),
        ("train.tasks.every_steps=2", "train.tasks.every_steps=2 must not go with model.mixer=peer"),
    ],
)
def test_what_a_peer_cannot_do_is_said_before_anything_is_made(data, tmp_path, capsys, override, said):
    tasks = ["train.tasks.names=[lambada_openai]"] if "tasks" in override else []
    with fake_peers():
        assert main(build_arguments(tmp_path / "run", data, override, *tasks)) == EXIT_USAGE
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_the_package_a_run_ends_in_the_line_that_brings_it(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("prism_lm.model.peer_rules.importlib.util.find_spec", lambda name: None)
    assert main(build_arguments(tmp_path / "run", data)) == EXIT_USAGE
    said = "model.mixer=peer must have flash-linear-attention; pip install -e '.[peers]'"
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_options_typed_as_a_mapping_are_written_and_read_back_equal(tmp_path: Path) -> None:
    typed = ["run_dir=a", "data.path=b", "model.mixer=peer", "model.peer_layer=GatedDeltaProduct"]
    config = load_config(RunConfig, CONFIG, [*typed, "model.peer_options={num_householder: 2, use_gate: false}"])
    assert config.model.peer_options == {"num_householder": 2, "use_gate": False}
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(RunConfig, file) == config


def test_the_fingerprint_of_a_model_without_a_peer_is_that_of_before_there_were_any() -> None:
    assert fingerprint_model(ModelConfig()) == "7a91d7f433679f6c9d63f2e4c20ea4aff993a399a62bd7c975059fce2216a184"
    peer = ModelConfig(mixer="peer", peer_layer="Mamba2")
    assert len({fingerprint_model(config) for config in (ModelConfig(), ModelConfig(mixer="gated_delta"), peer)}) == 3
