"""lm-eval through its own Hugging Face model on an exported folder, and through ours on the run: the same numbers.

The harness's model is given logits_cache=False. Its cache of answers of one token takes two rolling windows with equal
tokens but different splits between context and continuation for one, and scores the second wrongly.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from data_pipeline.tokenizer import load_tokenizer
from launcher.__main__ import main
from launcher.eval_suite import build_task_manager
from prism_lm.eval.lm_eval_adapter import score_tasks
from tests.launcher.learned_runs import MODEL, ROW_TOKENS, write_learned_run
from tests.launcher.trained_folders import TASK_FOLDER

TASKS = sorted(file.stem for file in TASK_FOLDER.glob("*.yaml"))
GENERATION = [name for name in TASKS if name.startswith("generate")]
ROLLING = [name for name in TASKS if name.startswith("rolling")]
CHOICE = [name for name in TASKS if name not in (*GENERATION, *ROLLING)]
ONE_OF_EACH = ["choice_of_three", "generate_line", "rolling_bytes"]
# In nats, of a text of up to 3,000 tokens, and of figures; of perplexities, which are powers of such sums, as a share.
TOLERANCE = 1e-4
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One thread, as the models are too small for two, and a place of its own for the code that transformers copies."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    copies = str(tmp_path_factory.mktemp("modules"))
    with mock.patch.dict(os.environ), mock.patch("transformers.dynamic_module_utils.HF_MODULES_CACHE", copies):
        yield
    torch.set_num_threads(former)


@pytest.fixture(scope="module")
def manager() -> Any:
    return build_task_manager(TASKS, [TASK_FOLDER])


@pytest.fixture(scope="module")
def tasks(manager: Any) -> dict[str, Any]:
    return manager.load(TASKS)["tasks"]


@pytest.fixture(scope="module")
def run_dir(tasks: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_learned_run(tmp_path_factory.mktemp("runs") / "prism", tasks, steps=80)


@pytest.fixture(scope="module")
def ours(run_dir: Path) -> dict[str, Any]:
    return score_run(run_dir, TASKS)


@pytest.fixture(scope="module")
def theirs(run_dir: Path, manager: Any) -> dict[str, Any]:
    return score_exported(run_dir, TASKS, manager)


def score_run(run_dir: Path, names: list[str]) -> dict[str, Any]:
    """Results and samples that `prism evaluate` leaves."""
    options = ["--tasks", ",".join(names), "--task-data", str(TASK_FOLDER), "--log-samples", "--batch-tokens", "1024"]
    assert main(["evaluate", str(run_dir), *options]) == 0
    folder = run_dir / "evaluations" / "tasks_step_0"
    files = {name: folder / f"samples_{name}.jsonl" for name in names}
    samples = {name: list(map(json.loads, file.read_text().splitlines())) for name, file in files.items()}
    return {**json.loads((folder / "results.json").read_text()), "samples": samples}


def score_exported(run_dir: Path, names: list[str], manager: Any) -> dict[str, Any]:
    """Results and samples of lm-eval's own model on the folder that `prism export` makes."""
    from lm_eval.models.huggingface import HFLM

    exported = run_dir.with_name(f"exported_{run_dir.name}")
    assert main(["export", str(run_dir), str(exported)]) == 0
    with mock.patch.dict(os.environ):
        for name in RANK_VARIABLES:  # our own commands set them, and accelerate would make a process group of them
            os.environ.pop(name, None)
        lm: Any = HFLM(
            pretrained=str(exported),
            trust_remote_code=True,
            add_bos_token=True,
            max_length=ROW_TOKENS,
            dtype="float32",
            device="cpu",
            batch_size=8,
            logits_cache=False,
        )
    return score_tasks(lm, names, manager, log_samples=True)


def read_figures(scored: dict[str, Any], name: str) -> dict[str, float]:
    found = scored["results"][name]
    return {key: float(value) for key, value in found.items() if "," in key and "_stderr" not in key}


def read_answers(scored: dict[str, Any], name: str) -> list[Any]:
    """What the model answered to each request of each document in turn, before any filter."""
    ordered = sorted(scored["samples"][name], key=lambda sample: sample["doc_id"])
    return [resps[0] for sample in ordered for resps in sample["resps"]]


def read_likelihoods(scored: dict[str, Any], name: str) -> list[float]:
    answers = read_answers(scored, name)
    return [float(answer[0] if name in CHOICE else answer) for answer in answers]


def assert_figures_agree(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> None:
    figures = read_figures(theirs, name)
    assert figures
    for key, value in figures.items():
        bound = {"rel": TOLERANCE} if "perplexity" in key else {"abs": TOLERANCE, "rel": 0}
        assert read_figures(ours, name)[key] == pytest.approx(value, **bound), key
    assert read_figures(ours, name).keys() == figures.keys()


def assert_likelihoods_agree(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> None:
    expected = read_likelihoods(theirs, name)
    assert len(expected) >= 6
    assert read_likelihoods(ours, name) == pytest.approx(expected, abs=TOLERANCE, rel=0)


@pytest.mark.parametrize("name", TASKS)
def test_every_figure_is_that_of_the_harness_own_model(ours: Any, theirs: Any, name: str) -> None:
    assert_figures_agree(ours, theirs, name)


@pytest.mark.parametrize("name", [*CHOICE, *ROLLING])
def test_every_likelihood_is_that_of_the_harness_own_model(ours: Any, theirs: Any, name: str) -> None:
    assert_likelihoods_agree(ours, theirs, name)


@pytest.mark.parametrize("name", CHOICE)
def test_the_same_choices_are_greedy(ours: Any, theirs: Any, name: str) -> None:
    assert [answer[1] for answer in read_answers(ours, name)] == [str(is_) for _, is_ in read_answers(theirs, name)]


@pytest.mark.parametrize("name", GENERATION)
def test_every_text_is_that_of_the_harness_own_model(ours: Any, theirs: Any, name: str) -> None:
    assert len(read_answers(theirs, name)) >= 6
    assert read_answers(ours, name) == read_answers(theirs, name)


def test_the_model_is_neither_always_right_nor_always_wrong(ours: dict[str, Any]) -> None:
    """What is compared above could be equal for no other reason than that it is nothing."""
    for names, metric in ((CHOICE, "acc"), (GENERATION, "exact_match")):
        found = [sample[metric] for name in names for sample in ours["samples"][name]]
        assert 0.05 < sum(found) / len(found) < 0.95, metric
    greedy = [answer[1] for name in CHOICE for answer in read_answers(ours, name)]
    assert {"True", "False"} == set(greedy)


def test_texts_are_words_that_end_at_stop_strings(ours: dict[str, Any], tasks: dict[str, Any], run_dir: Path) -> None:
    texts = [text for name in GENERATION for text in read_answers(ours, name)]
    assert not [text for text in texts if "\ufffd" in text]
    assert len(set(texts)) > len(texts) / 3
    tokenizer = load_tokenizer(run_dir / "tokenizer.model")
    for name in ("generate_line", "generate_until_words", "generate_long_prompt"):
        most = tasks[name].config.generation_kwargs["max_gen_toks"]
        ended = [text for text in read_answers(ours, name) if len(tokenizer.encode(text)) < most - 2]
        assert len(ended) >= 4, name


def test_attention_beside_prism_agrees_on_a_task_of_each_kind(
    tasks: dict[str, Any], manager: Any, tmp_path: Path
) -> None:
    hybrid = replace(MODEL, layer_pattern=["prism", "attention"], tie_embeddings=False)
    run_dir = write_learned_run(tmp_path / "hybrid", tasks, model=hybrid, steps=40)
    ours, theirs = score_run(run_dir, ONE_OF_EACH), score_exported(run_dir, ONE_OF_EACH, manager)
    for name in ONE_OF_EACH:
        assert_figures_agree(ours, theirs, name)
    for name in ("choice_of_three", "rolling_bytes"):
        assert_likelihoods_agree(ours, theirs, name)
    texts = read_answers(theirs, "generate_line")
    assert read_answers(ours, "generate_line") == texts
    assert len(set(texts)) > 1
