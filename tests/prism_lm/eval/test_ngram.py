import numpy as np
import pytest
import torch

from prism_lm.eval.ngram import (
    PRIOR_MASSES,
    choose_prior_mass,
    collect_pairs,
    compute_bigram,
    count_ngrams,
    score_bigram,
    score_unigram,
)

VOCAB = 7


def random_pairs(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, size=(count, 2))


@pytest.mark.parametrize("mass", [0.3, 10.0])
def test_bigram_is_a_distribution_for_every_context_seen_or_not(mass: float) -> None:
    counts = count_ngrams(random_pairs(9, seed=0), VOCAB)
    for context in range(VOCAB):
        pairs = np.stack([np.full(VOCAB, context), np.arange(VOCAB)], axis=1)
        assert compute_bigram(counts, pairs, mass).sum() == pytest.approx(1.0, abs=1e-12)


def test_bigram_equals_the_formula_counted_by_hand() -> None:
    counts = count_ngrams(np.array([[1, 2], [1, 2], [1, 3], [2, 3]]), VOCAB)
    unigram_of_2 = (2 + 1) / (4 + VOCAB)
    assert compute_bigram(counts, np.array([[1, 2]]), 3.0)[0] == pytest.approx((2 + 3.0 * unigram_of_2) / (3 + 3.0))


def test_masked_labels_are_neither_counted_nor_scored() -> None:
    batch = {"input_ids_BT": torch.tensor([[1, 2, 3]]), "labels_BT": torch.tensor([[2, -100, 4]])}
    assert collect_pairs([batch]).tolist() == [[1, 2], [3, 4]]


def test_bigram_beats_unigram_on_text_with_order_and_not_on_text_without() -> None:
    chain = np.array([[token % VOCAB, (token + 1) % VOCAB] for token in range(200)])
    token_bytes = np.ones(VOCAB, dtype=np.int64)
    ordered = count_ngrams(chain, VOCAB)
    assert (
        score_bigram(ordered, chain, token_bytes, validation_pairs=chain).bits_per_byte
        < score_unigram(ordered, chain, token_bytes).bits_per_byte
    )
    noise, held_out = random_pairs(400, seed=1), random_pairs(400, seed=2)
    counts = count_ngrams(noise, VOCAB)
    bigram = score_bigram(counts, held_out, token_bytes, validation_pairs=held_out)
    assert bigram.nats == pytest.approx(score_unigram(counts, held_out, token_bytes).nats, rel=0.02)


def test_prior_mass_is_the_best_of_the_grid_on_validation() -> None:
    counts, validation = count_ngrams(random_pairs(300, seed=3), VOCAB), random_pairs(100, seed=4)
    likelihood = {mass: np.log(compute_bigram(counts, validation, mass)).sum() for mass in PRIOR_MASSES}
    assert choose_prior_mass(counts, validation, PRIOR_MASSES) == max(likelihood, key=likelihood.get)
