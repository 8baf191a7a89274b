import re
from pathlib import Path

import pytest
import yaml

from launcher.config import RunConfig, dump_config, load_config
from prism_lm.model.peer_rules import describe_model
from prism_lm.model.sizes import named_size, size_names

CONFIGS = Path(__file__).parent.parent.parent / "configs"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.wdth=3"], ["model.wdth must be a key", "did you mean", "key_width"]),
        (["model.mixer=x"], ["model.mixer=x must be one of prism|gated_delta|linear_attention|ttt|attention|peer;"]),
        (
            ["model.layer_pattern=[prism,x]"],
            ["model.layer_pattern[1]=x must be one of prism|gated_delta|linear_attention|ttt|attention|peer;"],
        ),
        (["train.steps=many"], ["train.steps=many must be of type int;"]),
        (["train.optim=5"], ["train.optim=5 must be a group of keys such as train.optim.learning_rate;"]),
        (["data.weights=[1]"], ["data.weights= must be of type map of str to float;"]),
        (["data.weights={a: b}"], ["data.weights.a=b must be of type float;"]),
        (["data.path=[*.p]"], ["data.path=[*.p] must hold a YAML value;"]),
        (["train.steps"], ["train.steps must have the form key=value"]),
        (["--steps=3"], ["must have the form key=value"]),
        (["seed=-1"], ["seed=-1 must be at least 0"]),
        (["run_dir="], ["run_dir= must be of type str"]),
        (["run_dir=''"], ["run_dir= must name a folder"]),
        (["train.precision=bf16", "train.zero_stage=0"], ["train.precision=bf16", "train.zero_stage=0", "use"]),
        (
            ["train.schedule.warmup_steps=500", "train.steps=400"],
            ["train.schedule.warmup_steps=500", "train.steps=400"],
        ),
        (["model.key_width=20"], ["model.key_width=20", "multiple of 16"]),
        (["model.layer_pattern=[prism,attention]"], ["model.layer_pattern", "model.num_layers=3"]),
    ],
)
def test_error_names_key_value_rule_and_remedy_on_one_line(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        load_config(RunConfig, CONFIGS / "train" / "tiny.yaml", overrides)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_required_key_is_asked_for_by_name() -> None:
    with pytest.raises(ValueError, match="run_dir must be given; add run_dir=VALUE"):
        load_config(RunConfig, None)


@pytest.mark.parametrize("content", ["model: [", "a: b: c"])
def test_invalid_yaml_names_the_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"CONFIG={file} must be valid YAML")):
        load_config(RunConfig, file)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("run_dir: café".encode("latin-1"), "must be a text file in UTF-8 ("),
        ("run_dir: x".encode("utf-16"), "must be a text file in UTF-8 ("),
        (b"12\n", "must be a YAML file of keys that can be read ("),
    ],
    ids=["latin", "wide", "number"],
)
def test_file_that_is_no_text_in_utf8_or_holds_no_keys_is_named(tmp_path: Path, content: bytes, rule: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"CONFIG={file} {rule}")) as caught:
        load_config(RunConfig, file)
    assert type(caught.value) is ValueError and "\n" not in str(caught.value)


def test_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=re.escape("CONFIG=nowhere.yaml must be an existing YAML file")):
        load_config(RunConfig, "nowhere.yaml")


def test_command_line_goes_before_file_and_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run_dir: here\ntrain:\n  steps: 7\n  optim:\n    learning_rate: 0.5\n")
    config = load_config(RunConfig, file, ["train.steps=200"])
    assert (config.train.steps, config.train.optim.learning_rate) == (200, 0.5)
    assert config.seed == RunConfig(run_dir="here").seed


@pytest.mark.parametrize("file", sorted((CONFIGS / "train").glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_config_loads_and_round_trips_through_its_own_dump(file: Path, tmp_path: Path) -> None:
    config = load_config(RunConfig, file)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(RunConfig, tmp_path / "config.yaml") == config


def test_every_named_size_ships_a_config_with_its_model_written_out_in_full() -> None:
    shipped = {file.stem: yaml.safe_load(file.read_text())["model"] for file in (CONFIGS / "train").glob("*.yaml")}
    assert set(size_names()) <= set(shipped)
    for name in size_names():
        assert load_config(RunConfig, CONFIGS / "train" / f"{name}.yaml").model == named_size(name)
        assert set(shipped[name]) == set(describe_model(named_size(name)))
