"""Exported folders where our package is not installed, in transformers 4.57 and 5: users get what we compute."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_pipeline.hf_tokenizer import HARD_TEXTS
from data_pipeline.tokenizer import Tokenizer
from prism_lm.model.generate import generate, pad_left
from prism_lm.model.lm import LanguageModel
from tests.prism_lm.export.folders import (
    SITE,
    install_transformers_5,
    read_gradients,
    train_small_tokenizer,
    write_folder,
)
from tests.prism_lm.model.builders import FAMILIES, SMALL, build_small

PROGRAM = Path(__file__).with_name("foreign.py")
PROMPTS = [[1, 5, 7, 9], [1, 3], [1, 8, 8, 8, 8, 20, 30]]
MAX_NEW_TOKENS = 8
INPUT_IDS = torch.randint(3, 61, (2, 37), generator=torch.Generator().manual_seed(5))
# The same operations in the same order, in another process: fp32 may differ by the order of sums.
TOLERANCE = 1e-5
MODELS = {name: (config, torch.float32) for name, config in FAMILIES.items()}
MODELS["bf16"] = (replace(SMALL, tie_embeddings=False), torch.bfloat16)
SHARDED = "gated_delta"


@dataclass(frozen=True)
class Answers:
    """Of one version of transformers."""

    values: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def tensor(self, name: str, key: str) -> torch.Tensor:
        return self.tensors[f"{name}/{key}"]


@pytest.fixture(scope="module")
def models() -> dict[str, LanguageModel]:
    return {name: build_small(config, dtype=dtype).eval() for name, (config, dtype) in MODELS.items()}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_small_tokenizer()


@pytest.fixture(scope="module")
def folders(models, tokenizer, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exported")
    sizes = {name: 20_000 if name == SHARDED else 10**9 for name in models}
    return {
        name: write_folder(root / name, model, tokenizer, max_shard_bytes=sizes[name]) for name, model in models.items()
    }


@pytest.fixture(scope="module", params=["installed", "5"])
def answers(request, folders, tmp_path_factory) -> Answers:
    """Everything asked at once: what costs time is to import transformers."""
    paths = [str(SITE)]
    if request.param == "5":
        try:
            paths.insert(0, str(install_transformers_5()))
        except RuntimeError as error:
            pytest.skip(f"transformers 5 cannot be installed here: {error}")
    exchange = tmp_path_factory.mktemp("exchange")
    asked = {
        "folders": {name: str(folder) for name, folder in folders.items()},
        "tokenizer": str(folders["prism"]),
        "texts": list(HARD_TEXTS),
        "input_ids": INPUT_IDS.tolist(),
        "prompts": PROMPTS,
        "max_new_tokens": MAX_NEW_TOKENS,
    }
    (exchange / "request.json").write_text(json.dumps(asked), encoding="utf-8")
    own = {"HF_MODULES_CACHE": str(exchange / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-P", str(PROGRAM), str(exchange), *paths],
        cwd=exchange,
        env={"PATH": os.environ["PATH"], "HOME": str(exchange), **own},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    values = json.loads((exchange / "answer.json").read_text(encoding="utf-8"))
    assert (values["version"][0] == "5") == (request.param == "5")
    return Answers(values, load_file(exchange / "answer.safetensors"))


def is_near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).abs().max() <= TOLERANCE * expected.abs().max())


def test_none_of_our_packages_was_there(answers) -> None:
    assert answers.values["ours"] == []


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_found_in_its_precision_and_ties_are_kept(answers, models, name) -> None:
    config, dtype = MODELS[name]
    values = answers.values[name]
    assert values["load_problems"] == []
    assert (values["dtype"], values["is_tied"]) == (str(dtype), config.tie_embeddings)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_ours_also_beside_padding_and_after_saving_again(answers, models, name) -> None:
    model = models[name]
    with torch.no_grad():
        expected = model.logits(INPUT_IDS)[0]
        padded, starts = pad_left(PROMPTS)
        masked = model.logits(padded, document_start_BT=starts)[0]
    assert is_near(answers.tensor(name, "logits"), expected)
    assert is_near(answers.tensor(name, "again"), expected)
    for row, prompt in enumerate(PROMPTS):
        assert is_near(answers.tensor(name, "masked")[row, -len(prompt) :], masked[row, -len(prompt) :])


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_are_ours(answers, models, name) -> None:
    model = models[name]
    gradients = read_gradients(model, INPUT_IDS)
    with torch.no_grad():
        loss = model(INPUT_IDS[:, :-1], None, INPUT_IDS[:, 1:].contiguous()).item() / INPUT_IDS[:, 1:].numel()
    assert answers.values[name]["loss"] == pytest.approx(loss, rel=1e-6)
    for key, gradient in gradients.items():
        assert is_near(answers.tensor(name, f"model.{key}"), gradient), key


@pytest.fixture(scope="module")
def greedy_texts(models) -> dict[str, list[list[int]]]:
    settings = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0.0}
    return {name: generate(model, PROMPTS, **settings) for name, model in models.items()}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_ours_batched_alone_and_without_a_cache(answers, greedy_texts, name) -> None:
    for way in ("batched", "batched_without_cache", "alone"):
        assert answers.values[name][way] == greedy_texts[name], way


@pytest.mark.parametrize("name", MODELS)
def test_beam_search_reorders_the_cache(answers, name) -> None:
    assert answers.values[name]["beams"] == answers.values[name]["beams_without_cache"]


def test_tokenizer_gives_our_tokens_after_bos_and_the_text_back(answers, tokenizer) -> None:
    found = answers.values["tokenizer"]
    assert found["ids"] == [[tokenizer.bos_id, *tokenizer.encode(text)] for text in HARD_TEXTS]
    assert found["texts"] == [tokenizer.decode(tokenizer.encode(text)) for text in HARD_TEXTS]


def test_tokenizer_pads_on_the_left_and_gives_what_the_model_takes(answers) -> None:
    found = answers.values["tokenizer"]
    assert found["keys"] == ["attention_mask", "input_ids"]
    assert found["mask"][0][0] == 0 and found["mask"][0][-1] == found["mask"][1][0] == 1


def test_a_small_shard_size_gives_several_files_and_their_index(folders) -> None:
    index = json.loads((folders[SHARDED] / "model.safetensors.index.json").read_text())
    names = {path.name for path in folders[SHARDED].glob("*.safetensors")}
    assert len(names) > 2 and names == set(index["weight_map"].values())
    assert all(path.stat().st_size < 30_000 for path in folders[SHARDED].glob("*.safetensors"))
