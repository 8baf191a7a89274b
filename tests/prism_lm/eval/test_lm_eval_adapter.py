import json
import os
import random
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from prism_lm.eval.lm_eval_adapter import PrismLM, read_metrics, score_tasks
from prism_lm.model.generate import generate as model_generate
from prism_lm.parallel.collectives import RunFailed
from prism_lm.parallel.mesh import process_group
from tests.harness import read_ranks, run_on
from tests.prism_lm.eval.bigrams import (
    LetterTokenizer,
    build_bigram_model,
    compute_likelihood,
    draw_table,
    sharpen,
)
from tests.prism_lm.model.builders import FAMILIES, build_small

TABLE = draw_table()
ENCODE = LetterTokenizer().encode
BOS = LetterTokenizer.bos_id


def build_lm(table: torch.Tensor = TABLE, **settings: Any) -> PrismLM:
    given = {"max_length_tokens": 32, "batch_tokens": 64, **settings}
    return PrismLM(build_bigram_model(table), LetterTokenizer(), **given)


def build_requests(kind: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, given, place) for place, given in enumerate(arguments)]


def score(lm: PrismLM, *pairs: tuple[str, str]) -> list[float]:
    return [found for found, _ in lm.loglikelihood(build_requests("loglikelihood", pairs))]


@pytest.mark.parametrize(
    ("context", "continuation", "read", "scored"),
    [
        ("the cat", " sat", "the cat sat", 4),
        ("", "cat", "cat", 3),
        ("cat ", "sat", "cat sat", 4),
        ("the cat sat on the mat and the dog", " ran", "the cat sat on the mat and the dog ran", 4),
    ],
    ids=["plain", "no context", "space moves to the continuation", "longer than a row"],
)
def test_likelihood_is_the_one_worked_out_by_hand(context: str, continuation: str, read: str, scored: int) -> None:
    expected = compute_likelihood(TABLE, [BOS, *ENCODE(read)][-scored - 1 :])
    assert score(build_lm(), (context, continuation)) == [pytest.approx(expected, rel=1e-8)]


def test_a_continuation_that_melts_into_its_context_is_scored_after_the_context_alone() -> None:
    expected = compute_likelihood(TABLE, ENCODE("ce"))
    assert ENCODE("the") != [*ENCODE("t"), *ENCODE("he")]
    assert score(build_lm(), ("t", "he")) == [pytest.approx(float(TABLE[ENCODE("t")[0], ENCODE("e")[0]]), rel=1e-8)]
    assert score(build_lm(), ("c", "e")) == [pytest.approx(expected, rel=1e-8)]


def test_a_context_longer_than_the_row_is_cut_on_the_left_to_the_tokens_before_the_last() -> None:
    """What is left is read as a document of its own, 32 tokens of input, by a model that looks far back."""
    model = build_small(FAMILIES["prism"])
    context, continuation = "the dog ran to the end of the road and", " back"
    (found,) = score(PrismLM(model, LetterTokenizer(), max_length_tokens=32, batch_tokens=64), (context, continuation))
    tokens = torch.tensor([ENCODE(context + continuation)[-33:]])
    starts = torch.zeros(1, 32, dtype=torch.bool)
    starts[0, 0] = True
    with torch.no_grad():
        log_likelihoods = model(tokens[:, :-1], starts, None)[0, -5:].log_softmax(-1)
    assert found == pytest.approx(float(log_likelihoods.gather(1, tokens[0, -5:, None]).sum()), rel=1e-10)


@pytest.mark.parametrize("continuation", ["", "a continuation longer than the whole row"])
def test_a_continuation_of_no_token_or_of_more_than_a_row_is_refused(continuation: str) -> None:
    with pytest.raises(ValueError, match=r"has \d+ tokens, which must be at least 1 and at most max_length_tokens=32"):
        score(build_lm(), ("the", continuation))


@pytest.mark.parametrize("words", [3, 40], ids=["one window", "several windows"])
def test_rolling_likelihood_is_that_of_the_whole_text_after_two_bos_as_the_harness_has_it(words: int) -> None:
    text = " ".join(["the cat", "a dog", "one bird"][place % 3] for place in range(words))
    expected = compute_likelihood(TABLE, [BOS, BOS, *ENCODE(text)])
    (found,) = build_lm().loglikelihood_rolling(build_requests("loglikelihood_rolling", [(text,)]))
    assert found == pytest.approx(expected, rel=1e-8)


def test_greedy_is_what_the_table_likes_best() -> None:
    lm = build_lm(sharpen(TABLE, [BOS, *ENCODE("the cow")]))
    requests = build_requests("loglikelihood", [("the", " cow"), ("the", " cat"), ("", "the cow")])
    assert [is_greedy for _, is_greedy in lm.loglikelihood(requests)] == [True, False, True]


CHAIN = [*ENCODE("q brown"), LetterTokenizer.eos_id, *ENCODE("x")]


def generate(lm: PrismLM, *requests: tuple[str, dict[str, Any]]) -> list[str]:
    return lm.generate_until(build_requests("generate_until", requests))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"until": [], "max_gen_toks": 4}, " bro"),
        ({"until": ["w"], "max_gen_toks": 12}, " bro"),
        ({"until": "wn", "max_gen_toks": 12}, " bro"),
        ({"until": ["", "n", "ro"], "max_gen_toks": 12}, " b"),
        ({"until": [" "], "max_gen_toks": 12}, ""),
        ({"until": ["x"], "max_gen_toks": 12}, " brown"),
        ({"until": ["x"], "max_new_tokens": 3, "do_sample": False, "temperature": 0.7}, " br"),
    ],
)
def test_a_text_ends_at_its_stop_string_at_eos_or_at_its_last_token(settings: dict[str, Any], expected: str) -> None:
    lm = build_lm(sharpen(TABLE, CHAIN))
    assert generate(lm, ("faq", settings), ("q", settings)) == [expected] * 2


def test_generation_ends_with_the_stop_strings_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = build_lm(sharpen(TABLE, CHAIN))
    calls: list[int] = []
    logits = lm.model.logits
    monkeypatch.setattr(lm.model, "logits", lambda *given, **named: calls.append(1) or logits(*given, **named))
    assert generate(lm, ("q", {"until": ["o"], "max_gen_toks": 30}), ("q", {"until": ["o"], "max_gen_toks": 30}))
    assert len(calls) == len(" bro")


def test_a_prompt_is_cut_on_the_left_to_leave_room_for_the_new_tokens() -> None:
    model = build_small(FAMILIES["prism"])
    lm = PrismLM(model, LetterTokenizer(), max_length_tokens=16, batch_tokens=64)
    prompt = "the dog and the cat sat on the mat"
    (expected,) = model_generate(model, [ENCODE(prompt)[-10:]], max_new_tokens=6, temperature=0)
    assert generate(lm, (prompt, {"until": [], "max_gen_toks": 6})) == [LetterTokenizer().decode(expected)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"until": [], "max_gen_toks": 32}, "max_gen_toks=32 must be above 0 and below max_length_tokens=32"),
        ({"until": [], "max_gen_toks": 0}, "max_gen_toks=0 must be above 0"),
        ({"until": [], "num_beams": 4}, "generation_kwargs.num_beams=4 must be one of do_sample, max_gen_toks"),
    ],
)
def test_what_the_model_cannot_generate_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate(build_lm(), ("a", settings))


SAMPLED = {"until": ["."], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}


def test_samples_differ_between_repeats_but_not_with_the_requests_around_them() -> None:
    lm = build_lm(batch_tokens=40)
    prompts = ["the", "the", "a cat and", "dogs", "birds sing at"]
    found = generate(lm, *((prompt, SAMPLED) for prompt in prompts))
    assert found[0] != found[1]
    assert generate(lm, *((prompt, SAMPLED) for prompt in reversed(prompts)))[:3] == found[:1:-1]
    assert generate(lm, ("the", SAMPLED)) == found[:1]


def answer_everything() -> list[Any]:
    ranks = read_ranks()
    pairs = [("the cat" * (1 + place % 3), f" {'sat' if place % 2 else 'on a mat'}") for place in range(8)]
    with process_group(ranks), mock.patch("prism_lm.eval.until.MOST_ROWS", 3):
        model = build_small(replace(FAMILIES["attention"], layer_pattern=["attention", "gated_delta"]))
        lm = PrismLM(model, LetterTokenizer(), max_length_tokens=24, batch_tokens=48, ranks=ranks)
        return [
            lm.loglikelihood(build_requests("loglikelihood", pairs)),
            lm.loglikelihood_rolling(build_requests("loglikelihood_rolling", [(text * 9,) for text, _ in pairs])),
            lm.generate_until(build_requests("generate_until", [(text, SAMPLED) for text, _ in pairs])),
        ]


def test_two_processes_answer_every_kind_of_request_as_one_does() -> None:
    (alone,) = run_on(1, answer_everything)
    assert run_on(2, answer_everything) == [alone, alone]


class FailingAtTheEnd:
    """Progress that fails on one rank once its own batches are done."""

    def begin(self, name: str, num_requests: int, num_tokens: int, /) -> None: ...
    def advance(self, num_requests: int, num_tokens: int, /) -> None: ...

    def end(self) -> None:
        if read_ranks().rank == 1:
            raise OSError("asked to stop")


def fail_at_the_end() -> list[str]:
    words: list[str] = []
    ranks = read_ranks()
    with process_group(ranks):
        model, progress = build_bigram_model(TABLE), FailingAtTheEnd()
        settings = {"max_length_tokens": 24, "batch_tokens": 48, "ranks": ranks, "progress": progress}
        lm = PrismLM(model, LetterTokenizer(), **settings)
        for kind, given in (("loglikelihood", ("the", " cat")), ("generate_until", ("the", SAMPLED))):
            with pytest.raises(RunFailed) as caught:
                getattr(lm, kind)(build_requests(kind, [given]))
            words.append(str(caught.value))
    return words


def test_progress_that_fails_on_one_process_after_its_last_batch_ends_all_of_them() -> None:
    assert run_on(2, fail_at_the_end) == [["asked to stop (rank 1 of 2)"] * 2] * 2


@pytest.fixture(scope="module")
def task_manager(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """A question with two answers, thrice over, and a text."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = [{"question": f"the {name}", "answers": ["cow", "ox"], "gold": 0} for name in ("one", "two", "six")]
    (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\ntest_split: test\n"
    choice = "output_type: multiple_choice\ndoc_to_text: question\ndoc_to_choice: answers\ndoc_to_target: gold\n"
    rolling = "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: question\n"
    metric = "metric_list: [{metric: byte_perplexity}]\n"
    (folder / "cows.yaml").write_text(f"task: cows\n{source}{choice}")
    (folder / "texts.yaml").write_text(f"task: texts\n{source}{rolling}{metric}")
    return TaskManager(include_path=str(folder), include_defaults=False)


def test_tasks_come_to_what_their_documents_do(task_manager: TaskManager) -> None:
    results = score_tasks(build_lm(), ["cows", "texts"], task_manager, log_samples=True)
    texts = ["the one", "the two", "the six"]
    cow, ox = ([compute_likelihood(TABLE, ENCODE(text[-1] + answer)) for text in texts] for answer in (" cow", " ox"))
    accuracy = np.mean(np.array(cow) > np.array(ox))
    nats = -sum(compute_likelihood(TABLE, [BOS, BOS, *ENCODE(text)]) for text in texts)
    metrics = read_metrics(results)
    assert metrics["eval/cows/acc"] == pytest.approx(accuracy)
    assert metrics["eval/texts/byte_perplexity"] == pytest.approx(np.exp(nats / len("".join(texts))), rel=1e-8)
    assert not [tag for tag in metrics if "stderr" in tag or "alias" in tag or "," in tag]
    assert len(results["samples"]["cows"]) == 3


def test_scoring_leaves_the_global_generators_and_the_environment_as_they_were(
    task_manager: TaskManager, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert score_tasks(build_lm(), ["cows"], task_manager, limit=1)["n-samples"]["cows"]["effective"] == 1
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert os.environ["LOCAL_RANK"] == "3"
    assert "Building contexts" not in capsys.readouterr().err


@pytest.mark.parametrize("describes_machine", [True, False])
def test_other_programs_are_asked_about_the_machine_only_where_it_is_described(
    describes_machine: bool, task_manager: TaskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, *given, **named: pytest.fail(f"ran {command}"))
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: asked.append("pip") or "a machine")
    before = evaluator.add_env_info, evaluator.get_git_commit_hash
    results = score_tasks(build_lm(), ["cows"], task_manager, limit=1, describes_machine=describes_machine)
    assert asked == (["pip"] if describes_machine else [])
    assert results.get("pretty_env_info") == ("a machine" if describes_machine else None)
    assert (evaluator.add_env_info, evaluator.get_git_commit_hash) == before


def test_metrics_carry_their_filter_and_only_numbers() -> None:
    figures = {"alias": "x", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,first": np.float32(0.25)}
    found = read_metrics({"results": {"task": {**figures, "note,none": "N/A"}}})
    assert found == {"eval/task/acc": 0.5, "eval/task/f1_first": 0.25}
