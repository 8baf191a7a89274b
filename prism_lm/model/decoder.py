"""Tokens one after another from what prompts left: the two calls of every decoder, the eager one, and how the host
reads the tokens without making the device wait.

Dims: B batch, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from prism_lm.model.decode_state import DecodeState
from prism_lm.model.lm import LanguageModel
from prism_lm.model.sampling import Sampling, UniformNumbers

CUDA_LAG_TOKENS = 4


class Decoder(Protocol):
    """Holds a model, and between two calls the state of the rows it continues."""

    lag_tokens: int
    "Steps that may be under way before the host reads the first of them; steps beyond a text's end are dropped."

    def start(self, logits_BV: Tensor, state: DecodeState, sampling: Sampling, numbers: UniformNumbers) -> Tensor:
        """The first token of each row, int64 B, from the logits and the state after its prompt."""
        ...

    def advance(self) -> Tensor:
        """The next token of each row, int64 B, in memory that the following call may use again."""
        ...

    def release(self) -> None:
        """Give up what was kept of these rows, where it is not memory that the next ones use too."""
        ...


class EagerDecoder:
    """Calls the model for every token: any device, any mixture of layers."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.device = find_device(model)
        self.lag_tokens = choose_lag(self.device)
        self._state: DecodeState | None = None

    def start(self, logits_BV: Tensor, state: DecodeState, sampling: Sampling, numbers: UniformNumbers) -> Tensor:
        self._state, self._sampling, self._uniforms = state, sampling, numbers.iterate(self.device)
        self._token_B = sampling.draw(logits_BV, next(self._uniforms))
        return self._token_B

    def advance(self) -> Tensor:
        logits_B1V, self._state = self.model.logits(self._token_B[:, None], state=self._state, last_only=True)
        self._token_B = self._sampling.draw(logits_B1V[:, -1], next(self._uniforms))
        return self._token_B

    def release(self) -> None:
        self._state = None


def find_device(model: LanguageModel) -> torch.device:
    """Where the model's weights are."""
    return next(model.parameters()).device


def choose_lag(device: torch.device) -> int:
    """Steps ahead of the host: none where the host computes them itself."""
    return CUDA_LAG_TOKENS if device.type == "cuda" else 0


def iterate_tokens(decoder: Decoder, first_B: Tensor, count: int) -> Iterator[list[int]]:
    """The tokens of every row, step by step, `count` times, the first of them given; the device is a few steps ahead
    of what is yielded."""
    pending = deque([_read_later(first_B)])
    for _ in range(count - 1):
        if len(pending) > decoder.lag_tokens:
            yield pending.popleft()()
        pending.append(_read_later(decoder.advance()))
    for read in pending:
        yield read()


def _read_later(token_B: Tensor) -> Callable[[], list[int]]:
    """Start copying the tokens to the host; the call that is returned waits for them."""
    if not token_B.is_cuda:
        tokens: list[int] = token_B.tolist()
        return lambda: tokens
    host_B = torch.empty(token_B.shape, dtype=token_B.dtype, pin_memory=True)
    host_B.copy_(token_B, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        return host_B.tolist()

    return read
