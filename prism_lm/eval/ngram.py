"""Unigram and bigram models counted on the training split: the floor that a trained model has to beat.

The bigram is interpolated with the unigram, P(b | a) = (c(a, b) + m P(b)) / (c(a) + m), the Dirichlet prior of MacKay
and Peto (1995); the prior mass m is the one that predicts the validation split best, so the baseline is at its best.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prism_lm.eval.perplexity import Score, ScoredBatch
from prism_lm.model.lm import IGNORED_LABEL

PRIOR_MASSES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
Pairs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class NgramCounts:
    """Counts of labels and of (input, label) pairs; a pair is coded as input * vocab_size + label, sorted."""

    vocab_size: int
    label_counts_V: npt.NDArray[np.int64]
    context_counts_V: npt.NDArray[np.int64]
    pair_codes: Pairs
    pair_counts: npt.NDArray[np.int64]


def collect_pairs(batches: Iterable[ScoredBatch]) -> Pairs:
    """Every (input, label) pair that a model would be asked for, shape [pairs, 2]."""
    found = []
    for batch in batches:
        inputs, labels = batch["input_ids_BT"].numpy(), batch["labels_BT"].numpy()
        counted = labels != IGNORED_LABEL
        found.append(np.stack([inputs[counted], labels[counted]], axis=1))
    return np.concatenate(found)


def count_ngrams(pairs: Pairs, vocab_size: int) -> NgramCounts:
    """Count the training split's pairs."""
    codes, counts = np.unique(pairs[:, 0] * vocab_size + pairs[:, 1], return_counts=True)
    labels = np.bincount(pairs[:, 1], minlength=vocab_size)
    contexts = np.bincount(pairs[:, 0], minlength=vocab_size)
    return NgramCounts(vocab_size, labels, contexts, codes, counts)


def score_unigram(counts: NgramCounts, pairs: Pairs, token_bytes_V: npt.NDArray[np.int64]) -> Score:
    """Score pairs by the label alone, add-one smoothed."""
    return _score(_compute_unigram(counts)[pairs[:, 1]], pairs, token_bytes_V)


def score_bigram(
    counts: NgramCounts, pairs: Pairs, token_bytes_V: npt.NDArray[np.int64], *, validation_pairs: Pairs
) -> Score:
    """Score pairs by the label given its input, at the prior mass that suits the validation pairs best."""
    mass = choose_prior_mass(counts, validation_pairs, PRIOR_MASSES)
    return _score(compute_bigram(counts, pairs, mass), pairs, token_bytes_V)


def choose_prior_mass(counts: NgramCounts, validation_pairs: Pairs, masses: Sequence[float]) -> float:
    """The mass with the largest likelihood of the validation pairs."""
    return max(masses, key=lambda mass: float(np.log(compute_bigram(counts, validation_pairs, mass)).sum()))


def compute_bigram(counts: NgramCounts, pairs: Pairs, mass: float) -> npt.NDArray[np.float64]:
    """P(label | input) of each pair, shape [pairs]."""
    codes = pairs[:, 0] * counts.vocab_size + pairs[:, 1]
    where = np.minimum(np.searchsorted(counts.pair_codes, codes), len(counts.pair_codes) - 1)
    seen = np.where(counts.pair_codes[where] == codes, counts.pair_counts[where], 0)
    prior = mass * _compute_unigram(counts)[pairs[:, 1]]
    return (seen + prior) / (counts.context_counts_V[pairs[:, 0]] + mass)


def _compute_unigram(counts: NgramCounts) -> npt.NDArray[np.float64]:
    return (counts.label_counts_V + 1) / (counts.label_counts_V.sum() + counts.vocab_size)


def _score(probabilities: npt.NDArray[np.float64], pairs: Pairs, token_bytes_V: npt.NDArray[np.int64]) -> Score:
    nats = -math.fsum(np.log(probabilities))
    return Score(nats, len(pairs), int(token_bytes_V[pairs[:, 1]].sum()))
