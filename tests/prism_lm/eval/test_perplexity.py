import math

import pytest
import torch
from torch import Tensor

from prism_lm.eval.perplexity import Score, add_scores, score_sources

VOCAB = 16
TOKEN_BYTES = torch.arange(VOCAB)


def uniform_model(input_ids_BT: Tensor, document_start_BT: Tensor, labels_BT: Tensor, *, reduction: str) -> Tensor:
    assert reduction == "none"
    return (labels_BT != -100) * math.log(VOCAB)


def score(*batches: dict[str, Tensor]) -> Score:
    """That of one source."""
    scores = score_sources(uniform_model, batches, TOKEN_BYTES, torch.device("cpu"), num_sources=1)
    return add_scores(scores)


def build_batch(labels: list[list[int]]) -> dict[str, Tensor]:
    labels_BT = torch.tensor(labels)
    return {
        "input_ids_BT": torch.zeros_like(labels_BT),
        "labels_BT": labels_BT,
        "document_start_BT": torch.zeros_like(labels_BT, dtype=torch.bool),
        "source_B": torch.zeros(len(labels), dtype=torch.int64),
    }


def test_uniform_model_costs_log_vocabulary_and_its_bits_over_the_labels_bytes() -> None:
    scored = score(build_batch([[1, 2, -100], [3, -100, 4]]))
    assert (scored.num_tokens, scored.num_bytes) == (4, 10)
    assert scored.loss_nats == pytest.approx(math.log(VOCAB))
    assert scored.perplexity == pytest.approx(VOCAB)
    assert scored.bits_per_byte == pytest.approx(4 * 4 / 10)


def test_score_does_not_depend_on_how_rows_are_batched() -> None:
    rows = [[1, 2, -100], [3, -100, 4], [5, 6, 7]]
    whole, singly = score(build_batch(rows)), score(*(build_batch([row]) for row in rows))
    assert (singly.num_tokens, singly.num_bytes) == (whole.num_tokens, whole.num_bytes)
    assert singly.nats == pytest.approx(whole.nats)


def test_split_without_a_label_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        score(build_batch([[-100]]))


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
