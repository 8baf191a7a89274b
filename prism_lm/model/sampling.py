"""One token a row from logits, wholly on their device: the uniform numbers that decide it are drawn beforehand, from a
CPU generator for each row, so that a text depends on its seed alone and a decode step never waits for the host.

Dims: B batch, V vocabulary, N uniform numbers drawn ahead.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_NUMBERS = 256
"Uniform numbers that are drawn, and moved to the device, at a time."


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen."""

    temperature: float = 1.0
    "Divides the logits; 0 takes the likeliest token."
    top_k: int = 0
    "Only the k likeliest tokens are possible; 0: all of them."
    top_p: float = 1.0
    "Only the smallest set of likeliest tokens whose probability reaches this is possible; above 0, 1: all of them."
    num_known_tokens: int | None = None
    "Only ids below this are drawn, those of a tokenizer smaller than the model's vocabulary. None: all."

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature={self.temperature} must be at least 0; use 0 for the likeliest token")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0; use 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; use 1 for all tokens")

    def draw(self, logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
        """One token a row, int64 B, by one number of [0, 1) a row, fp64; the likeliest one does without."""
        logits_BV = logits_BV[:, : self.num_known_tokens]
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        return sample(
            filter_logits(logits_BV, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p), uniform_B
        )


def filter_logits(logits_BV: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Logits to sample from: divided by the temperature, above 0; -inf outside the top_k likeliest tokens and outside
    the smallest set of likeliest tokens whose probability reaches top_p."""
    logits_BV = logits_BV / temperature
    if 0 < top_k < logits_BV.shape[-1]:
        logits_BV = _keep_top_k(logits_BV, top_k)
    return _keep_top_p(logits_BV, top_p) if top_p < 1 else logits_BV


def sample(logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """One token a row, int64 B, where the cumulative probability passes the row's uniform number. Tokens of
    probability 0 are never drawn."""
    cumulative_BV = logits_BV.double().softmax(-1).cumsum(-1)
    threshold_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(-1)


def _keep_top_k(logits_BV: Tensor, top_k: int) -> Tensor:
    """Exactly top_k tokens a row; the lower ids among equals."""
    order_BV = logits_BV.sort(dim=-1, descending=True, stable=True).indices
    return logits_BV.scatter(-1, order_BV[:, top_k:], -torch.inf)


def _keep_top_p(logits_BV: Tensor, top_p: float) -> Tensor:
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    probability_BV = sorted_BV.softmax(-1)
    before_BV = probability_BV.cumsum(-1) - probability_BV
    dropped_BV = (before_BV >= top_p).scatter(-1, order_BV, before_BV >= top_p)
    return logits_BV.masked_fill(dropped_BV, -torch.inf)


class UniformNumbers:
    """The numbers of [0, 1) that decide each row's tokens, fp64, one a token: those of a CPU generator of the row's
    seed, the same however many are drawn at a time."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def draw(self, device: torch.device, count: int = BLOCK_NUMBERS) -> Tensor:
        """The next `count` numbers of every row, (count, B), on a device that is not waited for."""
        rows = [torch.rand(count, generator=generator, dtype=torch.float64) for generator in self._generators]
        numbers_NB = torch.stack(rows, dim=1)
        if device.type != "cuda":
            return numbers_NB.to(device)
        return numbers_NB.pin_memory().to(device, non_blocking=True)

    def iterate(self, device: torch.device) -> Iterator[Tensor]:
        """The numbers B of one token after another."""
        while True:
            yield from self.draw(device).unbind(0)
