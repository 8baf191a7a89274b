"""The nine tasks against solvers that know nothing of how rows are made."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_lm.eval.probes.rows import CONTROL, DATA, IGNORED, NOISE, ROW_TOKENS, VOCAB_SIZE, draw_rows, is_heldout
from prism_lm.eval.probes.tasks import TASKS, choose_tasks
from prism_lm.model.lm import IGNORED_LABEL
from tests.prism_lm.eval.probes.solvers import SOLVERS

ASKED = {
    "mqar": 24,
    "poly_recall": 36,
    "variable_tracking": 24,
    "parity": 24,
    "local_xor": 24,
    "modulo_addition": 24,
    "palindrome": 48,
    "silence_gate": 24,
    "mux": 12,
}
every_task = pytest.mark.parametrize("name", TASKS)


@every_task
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**40), split=st.sampled_from(["train", "heldout"]))
def test_labels_are_what_a_solver_by_hand_answers_and_stand_nowhere_else(name: str, seed: int, split: str) -> None:
    rows = draw_rows(TASKS[name], num_rows=4, seed=[seed], split=split)
    for tokens, labels in zip(rows.tokens_RT.tolist(), rows.labels_RT.tolist(), strict=True):
        answers = SOLVERS[name](tokens)
        assert [IGNORED if answer is None else answer for answer in answers] == labels
        assert sum(label != IGNORED for label in labels) == ASKED[name]


@every_task
def test_tokens_are_of_the_vocabulary_and_answers_are_data(name: str) -> None:
    rows = draw_rows(TASKS[name], num_rows=200, seed=[3], split="train")
    assert rows.tokens_RT.shape == rows.labels_RT.shape == (200, ROW_TOKENS)
    assert rows.tokens_RT.dtype == rows.labels_RT.dtype == np.int64
    answers = rows.labels_RT[rows.labels_RT != IGNORED]
    assert set(np.unique(answers).tolist()) <= set(DATA)
    kinds = [set(np.unique(rows.tokens_RT).tolist()) & set(kind) for kind in (DATA, CONTROL, NOISE)]
    assert set(np.unique(rows.tokens_RT).tolist()) == set.union(*kinds)
    assert kinds[0] and kinds[2] == set(NOISE) and (kinds[1] or name == "mqar")


def test_data_control_and_noise_split_the_vocabulary_and_ignored_is_the_models() -> None:
    assert [*DATA, *CONTROL, *NOISE] == list(range(VOCAB_SIZE))
    assert IGNORED == IGNORED_LABEL


@every_task
def test_rows_depend_on_seed_step_and_task_and_on_nothing_else(name: str) -> None:
    first, again = (draw_rows(TASKS[name], num_rows=8, seed=[1, 2], split="train") for _ in range(2))
    np.testing.assert_array_equal(first.tokens_RT, again.tokens_RT)
    np.testing.assert_array_equal(first.labels_RT, again.labels_RT)
    for seed in ([1, 3], [2, 2]):
        assert (draw_rows(TASKS[name], num_rows=8, seed=seed, split="train").tokens_RT != first.tokens_RT).any()


@every_task
def test_no_seed_draws_a_row_of_the_other_split(name: str) -> None:
    for split in ("train", "heldout"):
        for seed in range(2):
            rows = draw_rows(TASKS[name], num_rows=50, seed=[seed], split=split)
            assert len(rows) == 50 and (is_heldout(rows.tokens_RT) == (split == "heldout")).all()


@every_task
def test_one_row_in_eight_is_held_out(name: str) -> None:
    share = is_heldout(TASKS[name].generate(np.random.default_rng(5), 2000).tokens_RT).mean()
    assert abs(share - 1 / 8) < 5 * math.sqrt(7 / 64 / 2000)


@every_task
def test_no_answer_and_no_position_beats_the_floor(name: str) -> None:
    """One question a row is independent: an answer's share lies within five deviations of the floor."""
    task = TASKS[name]
    labels_RT = draw_rows(task, num_rows=1500, seed=[9], split="heldout").labels_RT
    rng = np.random.default_rng(0)
    asked_R = np.where(labels_RT != IGNORED, rng.random(labels_RT.shape), -1).argmax(axis=1)
    answers = np.take_along_axis(labels_RT, asked_R[:, None], 1)[:, 0]
    shares = np.unique(answers, return_counts=True)[1] / len(answers)
    assert len(shares) == task.num_answers
    assert np.abs(shares - task.floor).max() < 5 * math.sqrt(task.floor * (1 - task.floor) / len(answers))


def test_unknown_task_is_refused_by_name_and_none_means_all_nine() -> None:
    assert [task.name for task in choose_tasks([])] == list(SOLVERS)
    with pytest.raises(ValueError, match="--tasks=sorting must be a task; use mqar"):
        choose_tasks(["mqar", "sorting"])
