"""`prism import`: a run folder of an exported one, with its very weights, that every other verb reads."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data_pipeline.synthetic import write_synthetic_dataset
from launcher.__main__ import EXIT_USAGE, VERBS, Verb, main
from launcher.config import RunConfig
from launcher.import_model import read_model
from launcher.imported_run import NO_DATA, draw_generators, write_imported_run
from launcher.run_data import open_loader
from launcher.trained_run import load_trained_run
from prism_lm.checkpoint.fragments import read_full, read_index
from prism_lm.checkpoint.load import newest_checkpoint, read_rank_state, read_trainer
from prism_lm.export.fla import read_fla
from prism_lm.export.folder import SpecialTokens, read_prism, write_model
from prism_lm.model.config import ModelConfig
from prism_lm.model.lm import build_model
from prism_lm.parallel.mesh import Ranks
from tests.harness import run_on
from tests.launcher.exported_runs import MODEL, build_config, draw_weights, train_small_tokenizer
from tests.prism_lm.export.fla_folders import SETTINGS, write_folder
from tests.prism_lm.export.fla_folders import draw_weights as draw_peer_weights

TIED = replace(MODEL, layer_pattern=[], tie_embeddings=True)


@pytest.fixture(autouse=True)
def verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERBS, "import", VERBS.get("import", Verb("", "", "import_model")))


@pytest.fixture(scope="module")
def tokenizer_model() -> bytes:
    return train_small_tokenizer()


def write_exported(folder: Path, model: ModelConfig, dtype: torch.dtype, tokenizer_model: bytes, **sizes: int) -> Path:
    """What of an exported folder is imported."""
    folder.mkdir()
    built = build_model(model, seed=5, dtype=dtype)
    ids = SpecialTokens(bos=1, eos=2, pad=0)
    write_model(folder, built, model, tokens=ids, row_tokens=64, max_shard_bytes=sizes.get("max_shard_bytes", 10**9))
    (folder / "tokenizer.model").write_bytes(tokenizer_model)
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tokenizer_model: bytes) -> Path:
    return write_exported(tmp_path_factory.mktemp("exported") / "small", MODEL, torch.float32, tokenizer_model)


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["untied hybrid", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_import_and_export_again_give_the_same_bytes(tmp_path: Path, tokenizer_model, model, dtype) -> None:
    first = write_exported(tmp_path / "first", model, dtype, tokenizer_model)
    assert main(["import", str(first), str(tmp_path / "run")]) == 0
    run = load_trained_run(tmp_path / "run", kernels="plain")
    held = load_file(run.checkpoint / "model.safetensors")
    assert {weight.dtype for weight in held.values()} == {dtype}
    (tmp_path / "second").mkdir()
    ids = SpecialTokens(bos=run.tokenizer.bos_id, eos=run.tokenizer.eos_id, pad=0)
    again = run.model.to(dtype)
    write_model(tmp_path / "second", again, run.config.model, tokens=ids, row_tokens=64, max_shard_bytes=10**9)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "second" / name).read_bytes() == (first / name).read_bytes()
    assert run.tokenizer.model == tokenizer_model and run.config.data.row_tokens == 64


def test_shards_are_put_together(tmp_path: Path, tokenizer_model: bytes) -> None:
    folder = write_exported(tmp_path / "shards", MODEL, torch.float32, tokenizer_model, max_shard_bytes=60_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert main(["import", str(folder), str(tmp_path / "run")]) == 0
    held = load_file(newest_checkpoint(tmp_path / "run") / "model.safetensors")
    assert all(torch.equal(held[name], weight) for name, weight in draw_weights(MODEL).items())


@pytest.fixture(scope="module")
def run_dir(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VERBS, "import", VERBS.get("import", Verb("", "", "import_model")))
        assert main(["import", str(exported), str(folder), "train.steps=700"]) == 0
    return folder


def test_checkpoint_is_one_that_was_saved_before_the_first_step(run_dir: Path) -> None:
    checkpoint = newest_checkpoint(run_dir)
    assert checkpoint.name == "step_0" and main(["checkpoint", "verify", str(run_dir)]) == 0
    trainer, weights = read_trainer(checkpoint), load_file(checkpoint / "model.safetensors")
    assert (trainer["tokens"], trainer["train"]["steps"], trainer["fingerprint.data"]) == (0, 700, NO_DATA)
    assert read_index(checkpoint).applied_steps == 0
    for name, weight in weights.items():
        assert torch.equal(read_full(checkpoint, name, "master"), weight)
        assert not read_full(checkpoint, name, "exp_avg").any() and not read_full(checkpoint, name, "exp_avg_sq").any()
    assert set(read_rank_state(checkpoint, 0)) == {"python", "numpy", "torch", "cuda"}


def test_run_says_where_it_came_from(run_dir: Path, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = [json.loads(line) for line in (run_dir / "lineage.jsonl").read_text().splitlines()]
    assert (line["event"], line["imported_from"], line["source"]) == ("import", str(exported), "prism")
    assert main(["status", str(run_dir)]) == 0
    assert "state        imported" in capsys.readouterr().out


def test_training_begins_from_the_weights_with_a_fresh_optimizer(exported: Path, tmp_path: Path) -> None:
    data = write_synthetic_dataset(tmp_path / "data", vocab_size=400, row_tokens=64, documents=40)
    keys = ["train.steps=2", "train.schedule.warmup_steps=1", "train.log_every_steps=1", "train.global_batch_rows=4"]
    given = ["--tokenizer", str(data / "tokenizer.model"), f"data.path={data}", *keys]
    assert main(["import", str(exported), str(tmp_path / "run"), *given]) == 0
    run = load_trained_run(tmp_path / "run", kernels="plain")
    batch = next(iter(open_loader(run.config, Ranks(), split="train")))
    with torch.no_grad():
        total = run.model(batch["input_ids_BT"], batch["document_start_BT"], batch["labels_BT"])
    expected = total.item() / int((batch["labels_BT"] != -100).sum())
    assert run_on(1, main, ["train", str(tmp_path / "run" / "config.yaml")]) == [0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["train/loss_nats"] for line in lines if "train/loss_nats" in line}
    assert losses[1] == pytest.approx(expected, rel=1e-5)
    assert read_trainer(newest_checkpoint(tmp_path / "run"))["step"] == 2


def test_training_without_data_says_what_to_do(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(run_dir / "config.yaml")]) == EXIT_USAGE
    assert "data.path= must be a folder that `prism prepare` wrote" in capsys.readouterr().err


def test_evaluation_without_data_names_its_own_option(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run_dir)]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("error: --data= must name the data to score")


def test_generators_of_the_checkpoint_are_its_seeds_and_this_process_keeps_its_own() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first, second = draw_generators(3), draw_generators(3)
    assert torch.equal(first["torch"], second["torch"]) and first["python"] == second["python"]
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def test_a_folder_of_a_run_is_refused(exported: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run_dir.rglob("*"))
    assert main(["import", str(exported), str(run_dir)]) == EXIT_USAGE
    assert f"RUN={run_dir} must be a new folder, but holds config.yaml" in capsys.readouterr().err
    assert sorted(run_dir.rglob("*")) == before


@pytest.mark.parametrize("inner", ["", "deeper/run"])
def test_a_file_in_the_place_of_the_run_is_refused(exported: Path, tmp_path: Path, inner: str, capsys) -> None:
    (tmp_path / "taken").write_text("mine")
    run_dir = tmp_path / "taken" / inner
    assert main(["import", str(exported), str(run_dir)]) == EXIT_USAGE
    rule = f"must be a new folder, but {tmp_path / 'taken'} is a file; name another one"
    assert capsys.readouterr().err == f"error: RUN={run_dir} {rule}\n"
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("max_position_embeddings", "x", "must be a whole number"),
        ("max_position_embeddings", 12.5, "must be a whole number"),
        ("max_position_embeddings", [64], "must be a whole number"),
        ("max_position_embeddings", True, "must be a whole number"),
        ("max_position_embeddings", -64, "must be at least 1"),
        ("num_layers", "2", "must be a whole number"),
        ("vocab_size", None, "must be a whole number"),
        ("model_width", 32.0, "must be a whole number"),
    ],
)
def test_count_in_the_configuration_that_is_none_is_named(
    exported: Path, tmp_path: Path, key: str, value: object, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(exported, tmp_path / "exported")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {key: value}))
    assert main(["import", str(folder), str(tmp_path / "run")]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"error: {key}={json.dumps(value)} {rule} in {folder / 'config.json'}; ")
    assert error.count("\n") == 1 and not (tmp_path / "run").exists()


def test_row_length_that_is_left_open_takes_the_default(exported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported, tmp_path / "exported")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": None}))
    assert read_model(folder, "prism")[2] == RunConfig(run_dir="unused").data.row_tokens


@pytest.mark.parametrize("key", ["model.num_layers=3", "run_dir=elsewhere"])
def test_keys_that_the_weights_fix_are_refused(exported: Path, tmp_path: Path, key, capsys) -> None:
    assert main(["import", str(exported), str(tmp_path / "run"), key]) == EXIT_USAGE
    assert f"{key} must not be given" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, words in ((None, "must hold config.json"), ('{"model_type": "llama"}', "must have model_type=prism")):
        if content:
            (tmp_path / "config.json").write_text(content)
        assert main(["import", str(tmp_path), str(tmp_path / "run")]) == EXIT_USAGE
        assert words in capsys.readouterr().err


def test_weights_of_another_model_and_a_tokenizer_too_large_leave_no_folder(tmp_path: Path, tokenizer_model) -> None:
    config, weights = build_config(tmp_path / "run"), draw_weights(MODEL)
    norm = "blocks.0.mixer.norm.weight"
    for changed, words in (
        ({name: weight for name, weight in weights.items() if name != norm}, rf"lack \['{norm}'\]"),
        (weights | {"extra": torch.ones(1)}, r"have \['extra'\] besides"),
        (weights | {norm: torch.ones(3)}, r"must have shape \(16,\) by the configuration, not \(3,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            write_imported_run(tmp_path / "run", config, changed, tokenizer_model, origin={})
    small = build_config(tmp_path / "run", replace(MODEL, vocab_size=300))
    with pytest.raises(ValueError, match=r"at most model\.vocab_size=300 pieces, not 400"):
        write_imported_run(tmp_path / "run", small, weights, tokenizer_model, origin={})
    assert list(tmp_path.iterdir()) == []


def test_weights_of_flash_linear_attention_become_a_run(tmp_path: Path, tokenizer_model: bytes) -> None:
    settings = SETTINGS | {"vocab_size": 400}
    folder = write_folder(tmp_path / "peer", settings, draw_peer_weights(settings))
    (tmp_path / "own.model").write_bytes(tokenizer_model)
    words = ["import", str(folder), str(tmp_path / "run"), "--from", "fla", "--tokenizer", str(tmp_path / "own.model")]
    assert main(words) == 0
    config, weights = read_fla(folder)
    run = load_trained_run(tmp_path / "run", kernels="plain")
    assert run.config.model == config and run.tokenizer.model == tokenizer_model
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, weights[name].float()), name


def test_exported_configuration_is_read_back_whole(exported: Path) -> None:
    assert read_prism(exported)[0] == MODEL
