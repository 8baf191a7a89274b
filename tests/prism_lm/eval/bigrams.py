"""A language model whose probabilities are known: the next token depends on the last one, by a table.

Each embedding is an axis of its own, no layer adds anything, and the head's weight holds the logarithms of the table.
"""

import math
from dataclasses import replace
from itertools import pairwise

import torch

from prism_lm.model.lm import LanguageModel, build_model
from tests.prism_lm.model.builders import FAMILIES

LETTERS = ["<bos>", "<eos>", "th", " ", "\n", *"abcdefghijklmnopqrstuvwxyz."]
VOCAB = len(LETTERS)


class LetterTokenizer:
    """One token a letter, but one for `th`, so that a continuation may melt into its context."""

    bos_id, eos_id, vocab_size = 0, 1, VOCAB

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        while text:
            piece = "th" if text.startswith("th") else text[0]
            tokens.append(LETTERS.index(piece))
            text = text[len(piece) :]
        return tokens

    def decode(self, pieces: list[int]) -> str:
        return "".join(LETTERS[piece] for piece in pieces if piece > 1)


def draw_table() -> torch.Tensor:
    """log P(next | last), [last, next], fp64."""
    generator = torch.Generator().manual_seed(11)
    return (2 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)).log_softmax(-1)


def sharpen(table: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """The table with each of those tokens far the likeliest after the one before."""
    scores = table.clone()
    for last, following in pairwise(tokens):
        scores[last, following] += 50
    return scores.log_softmax(-1)


def build_bigram_model(table: torch.Tensor) -> LanguageModel:
    """The model that predicts by the table, fp64."""
    config = replace(FAMILIES["attention"], vocab_size=VOCAB, model_width=VOCAB, tie_embeddings=False)
    model = build_model(config, seed=1, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("mixer.output.weight", "mlp.down.weight")):
                parameter.zero_()
        model.embedding.weight.copy_(1e3 * torch.eye(VOCAB))
        model.head.weight.copy_(table.T / math.sqrt(VOCAB))
    return model


def compute_likelihood(table: torch.Tensor, tokens: list[int]) -> float:
    """Of all tokens but the first."""
    return sum(float(table[last, following]) for last, following in pairwise(tokens))
