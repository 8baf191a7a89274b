"""How well a model predicts held-out text: nats a token, and bits a byte, which no choice of tokenizer can flatter."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict

import torch
from torch import Tensor

from prism_lm.model.lm import IGNORED_LABEL
from prism_lm.parallel.collectives import iterate_together, sum_tensor


@dataclass(frozen=True)
class Score:
    """Sums over every predicted token, so that scores of parts add up to the score of the whole."""

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def loss_nats(self) -> float:
        """Mean negative log likelihood of a token, in nats."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp of the mean loss: the size of a uniform choice that would be as hard."""
        return math.exp(self.loss_nats)

    @property
    def bits_per_byte(self) -> float:
        """Total negative log likelihood in bits over the bytes of text that the predicted tokens stand for."""
        return self.nats / math.log(2) / self.num_bytes


class ScoredBatch(TypedDict):
    """What scoring needs of a micro-batch: B rows of T tokens, int64, int64 (-100: not scored) and bool; and the source
    of each row, int64, -1 for none."""

    input_ids_BT: Tensor
    labels_BT: Tensor
    document_start_BT: Tensor
    source_B: Tensor


class ScoredModel(Protocol):
    """What scoring asks of a model: the nats of each label, BT, 0 of one that does not count."""

    def __call__(
        self, input_ids_BT: Tensor, document_start_BT: Tensor, labels_BT: Tensor, /, *, reduction: Literal["none"]
    ) -> Tensor: ...


@torch.no_grad()
def score_sources(
    model: ScoredModel, batches: Iterable[ScoredBatch], token_bytes_V: Tensor, device: torch.device, *, num_sources: int
) -> list[Score]:
    """The score of each source: every label of its rows that is not -100, of all processes of the run; each passes
    equally many batches. add_scores makes of them that of the whole.

    `token_bytes_V` (int64, on the CPU) holds the bytes of text each token stands for: 0 for the document marks. A
    source without rows has a score of no token. What a rank meets while reading is raised on all of them.
    """
    sums_S3 = torch.zeros(num_sources, 3, dtype=torch.float64)
    for batch in iterate_together(batches, name="the evaluated split"):
        inputs, starts, labels = (batch[key].to(device) for key in ("input_ids_BT", "document_start_BT", "labels_BT"))
        nats_B = model(inputs, starts, labels, reduction="none").double().sum(dim=1).cpu()
        is_scored_BT = batch["labels_BT"] != IGNORED_LABEL
        bytes_BT = token_bytes_V[batch["labels_BT"].clamp(min=0)] * is_scored_BT
        columns_B3 = torch.stack([nats_B, is_scored_BT.sum(dim=1).double(), bytes_BT.sum(dim=1).double()], dim=1)
        sums_S3 += (batch["source_B"] == torch.arange(num_sources)[:, None]).double() @ columns_B3
    return [Score(nats, int(tokens), int(size)) for nats, tokens, size in sum_tensor(sums_S3).tolist()]


def add_scores(scores: Iterable[Score]) -> Score:
    """The score of parts together. Raises ValueError for no token at all."""
    parts = list(scores)
    whole = Score(*(sum(getattr(part, name) for part in parts) for name in ("nats", "num_tokens", "num_bytes")))
    if whole.num_tokens == 0:
        raise ValueError("evaluated split must hold at least one token; prepare it with a larger share of the text")
    return whole
