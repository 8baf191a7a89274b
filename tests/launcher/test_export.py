"""`prism export`: a folder that is the run's model, or no folder and the reason."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.__main__ import EXIT_FAILED, EXIT_USAGE, VERBS, Verb, main
from launcher.export import ExportFailed, export_run, parse_size, read_texts
from prism_lm.export import round_trip
from prism_lm.export.round_trip import LoadedBack
from tests.launcher.exported_runs import MODEL, draw_weights, write_run

SHARD_BYTES = 10**9


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="module")
def bf16_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "bf16", precision="bf16")


@pytest.fixture(autouse=True)
def verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERBS, "export", VERBS.get("export", Verb("", "")))


@pytest.fixture
def loads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other process would answer, without it: it costs seconds and has a test of its own."""

    def answer(folder: Path, input_ids_BT: torch.Tensor, texts: list[str]) -> LoadedBack:
        from data_pipeline.tokenizer import load_tokenizer
        from prism_lm.export.folder import read_prism
        from prism_lm.model.lm import build_model

        config, weights = read_prism(folder)
        model = build_model(config, seed=0, dtype=next(iter(weights.values())).dtype)
        model.load_state_dict(weights)
        tokenizer = load_tokenizer(folder)
        pieces = [tokenizer.encode(text) for text in texts]
        with torch.no_grad():
            logits = model(input_ids_BT, None, None)
        ids = [[tokenizer.bos_id, *one] for one in pieces]
        return LoadedBack(logits_BTV=logits, ids=ids, texts=[tokenizer.decode(one) for one in pieces])

    monkeypatch.setattr(round_trip, "load_back", answer)


def test_export_is_loaded_by_another_process_and_says_what_it_proved(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "evaluations").mkdir(exist_ok=True)
    figures = {"split": "test", "bits_per_byte": 1.5, "loss_nats": 2.0, "perplexity": 7.39, "num_tokens": 1000}
    (run_dir / "evaluations" / "test_step_0_data_0.json").write_text(json.dumps(figures))
    for name, title, row in (
        ("tasks_step_0", "step 0", "|piqa|0.61|"),
        ("tasks_step_0_brief", "step 0  only the first 4 documents of each task", "|piqa|0.75|"),
        ("tasks_step_01", "step 01", "|piqa|0.99|"),
    ):
        (run_dir / "evaluations" / name).mkdir(exist_ok=True)
        (run_dir / "evaluations" / name / "table.md").write_text(f"/home/me/run  {title}\n\n{row}\n")
    out = tmp_path / "out"
    assert main(["export", str(run_dir), str(out)]) == 0
    said = capsys.readouterr().out
    assert (
        "logits of 128 tokens differ from the run's by 0.0e+00" in said and "13 of 13 texts of a built-in set" in said
    )
    weights = load_file(out / "model.safetensors")
    assert all(torch.equal(weights[f"model.{name}"], held) for name, held in draw_weights(MODEL).items())
    card = (out / "README.md").read_text()
    assert "# out\n" in card and "| test | 1.5000 | 2.0000 | 7.39 | 1,000 |" in card and "13 of 13 texts" in card
    assert "|piqa|0.61|" in card and "/home/me" not in card and str(run_dir) not in card and "0.99" not in card
    assert "|piqa|0.61|\n\nOnly the first 4 documents of each task:\n\n|piqa|0.75|\n" in card
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"], config["torch_dtype"]) == ("prism", 64, "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("loads_at_once")
def test_auto_keeps_the_precision_of_the_training_and_another_can_be_asked_for(bf16_run: Path, tmp_path: Path) -> None:
    for precision, expected in (("auto", torch.bfloat16), ("fp32", torch.float32)):
        out = tmp_path / precision
        export_run(bf16_run, out, precision=precision, max_shard_bytes=SHARD_BYTES)
        assert {weight.dtype for weight in load_file(out / "model.safetensors").values()} == {expected}
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == str(expected).removeprefix("torch.")


@pytest.mark.usefixtures("loads_at_once")
def test_what_stands_at_out_is_replaced_only_when_asked_and_only_an_exported_folder(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("dear")
    assert main(["export", str(run_dir), str(out)]) == 0
    (out / "stale.txt").write_text("of before")
    assert main(["export", str(run_dir), str(out)]) == EXIT_USAGE
    assert "must not exist, so that nothing is lost" in capsys.readouterr().err and (out / "stale.txt").exists()
    assert main(["export", str(run_dir), str(out), "--overwrite"]) == 0
    assert not (out / "stale.txt").exists() and (out / "README.md").exists()
    assert main(["export", str(run_dir), str(other), "--overwrite"]) == EXIT_USAGE
    assert "must be an exported folder for --overwrite" in capsys.readouterr().err
    assert (other / "thesis.txt").read_text() == "dear"


def damage_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.final_norm.weight"][0] += 0.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.usefixtures("loads_at_once")
def test_a_folder_with_other_logits_is_not_published(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = round_trip.load_back
    monkeypatch.setattr(
        round_trip, "load_back", lambda folder, *asked: (damage_weights(folder), answer(folder, *asked))[1]
    )
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == EXIT_FAILED
    assert "its logits must be the run's to 1.0e-05 of the largest, but differ by" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("loads_at_once")
def test_a_tokenizer_that_cuts_otherwise_is_not_published_and_a_former_folder_stays(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export_run(run_dir, out, precision="auto", max_shard_bytes=SHARD_BYTES)
    before = sorted(path.name for path in out.iterdir())
    answer = round_trip.load_back

    def without_bos(*asked) -> LoadedBack:
        loaded = answer(*asked)
        return LoadedBack(logits_BTV=loaded.logits_BTV, ids=[one[1:] for one in loaded.ids], texts=loaded.texts)

    monkeypatch.setattr(round_trip, "load_back", without_bos)
    with pytest.raises(ExportFailed, match="AutoTokenizer must give"):
        export_run(run_dir, out, precision="auto", max_shard_bytes=SHARD_BYTES)
    assert sorted(path.name for path in out.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_transformers_says_of_a_broken_folder_reaches_the_user(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "broken.py"
    program.write_text("raise ValueError('this folder has no head')\n")
    monkeypatch.setattr(round_trip, "PROGRAM", program)
    with pytest.raises(ExportFailed, match="but says: ValueError: this folder has no head"):
        export_run(run_dir, tmp_path / "out", precision="auto", max_shard_bytes=SHARD_BYTES)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.py"]


def test_missing_transformers_is_said_before_anything_is_done(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == EXIT_USAGE
    assert "pip install 'prism-lm[export]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "expected"), [("5GB", 5 * 10**9), ("1.5MB", 1_500_000), ("40KB", 40_000)])
def test_sizes_are_in_powers_of_ten(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["5", "GB", "0GB", "-1GB", "5gib"])
def test_a_size_without_a_unit_or_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--max-shard-size={text} must be a positive number of KB, MB or GB"):
        parse_size(text)


def test_documents_of_the_test_split_are_the_texts_compared(tmp_path: Path) -> None:
    from dataclasses import replace

    from data_pipeline.synthetic import write_synthetic_dataset
    from data_pipeline.tokenizer import load_tokenizer
    from launcher.trained_run import find_run

    data = write_synthetic_dataset(tmp_path / "data", vocab_size=400, row_tokens=64, documents=40)
    run = find_run(write_run(tmp_path / "run"), kernels="plain")
    config = replace(run.config, data=replace(run.config.data, path=str(data)))
    run = replace(run, config=config, tokenizer=load_tokenizer(data))
    texts, name = read_texts(run, tmp_path / "run")
    found = list(texts)
    assert (
        name.startswith("the test split (of its first") and len(found) > 10 and not any("<s>" in text for text in found)
    )
    written = "".join(file.read_text() for file in tmp_path.glob("data-text/*.txt"))
    assert all(text in written for text in found)
