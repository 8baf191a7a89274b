import math

import pytest
import torch
from torch import Tensor

from prism_lm.eval.perplexity import Score, add_scores, score_batches, score_sources

VOCAB = 16
TOKEN_BYTES = torch.arange(VOCAB)


def uniform_model(input_ids_BT: Tensor, document_start_BT: Tensor, labels_BT: Tensor) -> Tensor:
    return (labels_BT != -100).sum() * math.log(VOCAB)


def build_batch(labels: list[list[int]]) -> dict[str, Tensor]:
    labels_BT = torch.tensor(labels)
    return {
        "input_ids_BT": torch.zeros_like(labels_BT),
        "labels_BT": labels_BT,
        "document_start_BT": torch.zeros_like(labels_BT, dtype=torch.bool),
    }


def test_uniform_model_costs_log_vocabulary_and_its_bits_over_the_labels_bytes() -> None:
    score = score_batches(uniform_model, [build_batch([[1, 2, -100], [3, -100, 4]])], TOKEN_BYTES, torch.device("cpu"))
    assert (score.num_tokens, score.num_bytes) == (4, 10)
    assert score.loss_nats == pytest.approx(math.log(VOCAB))
    assert score.perplexity == pytest.approx(VOCAB)
    assert score.bits_per_byte == pytest.approx(4 * 4 / 10)


def test_score_does_not_depend_on_how_rows_are_batched() -> None:
    rows = [[1, 2, -100], [3, -100, 4], [5, 6, 7]]
    whole = score_batches(uniform_model, [build_batch(rows)], TOKEN_BYTES, torch.device("cpu"))
    singly = score_batches(uniform_model, [build_batch([row]) for row in rows], TOKEN_BYTES, torch.device("cpu"))
    assert (singly.num_tokens, singly.num_bytes) == (whole.num_tokens, whole.num_bytes)
    assert singly.nats == pytest.approx(whole.nats)


def test_split_without_a_label_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        score_batches(uniform_model, [build_batch([[-100]])], TOKEN_BYTES, torch.device("cpu"))


def test_bits_per_byte_of_parts_add_up_by_bytes() -> None:
    assert Score(math.log(2) * 30, 5, 10).bits_per_byte == pytest.approx(3.0)


def token_model(input_ids_BT: Tensor, document_start_BT: Tensor, labels_BT: Tensor, *, reduction: str) -> Tensor:
    """A label costs its own number of nats."""
    assert reduction == "none"
    return labels_BT.clamp(min=0).float()


def test_each_source_is_scored_by_its_own_rows_and_the_parts_are_the_whole() -> None:
    first = build_batch([[1, 2, -100], [3, -100, 4], [-100, -100, -100]]) | {"source_B": torch.tensor([0, 2, -1])}
    second = build_batch([[5, 6, 7]]) | {"source_B": torch.tensor([0])}
    scores = score_sources(token_model, [first, second], TOKEN_BYTES, torch.device("cpu"), num_sources=3)
    assert scores == [Score(21.0, 5, 21), Score(0.0, 0, 0), Score(7.0, 2, 7)]
    assert add_scores(scores) == Score(28.0, 7, 28)
    with pytest.raises(ValueError, match="at least one token"):
        add_scores(scores[1:2])
