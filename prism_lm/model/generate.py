"""Text from a model: prompts are read by the chunk form, then one step makes one token of each; recurrent layers keep a
constant-size state.

Dims: B batch (prompts), T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from prism_lm.model.decode_state import DecodeState
from prism_lm.model.decoder import Decoder, EagerDecoder, find_device, iterate_tokens
from prism_lm.model.lm import LanguageModel
from prism_lm.model.prefill import pad_left, read_in_pieces
from prism_lm.model.sampling import Sampling, UniformNumbers

ReadPrompt = Callable[[Tensor, Tensor], tuple[Tensor, DecodeState]]
"Token ids and document starts, both BT, to the last token's logits (B, 1, V) and the state after it."
ShouldStop = Callable[[int, list[int]], bool]
"A prompt's place in the list and its new tokens so far, at least one, to whether it ends there; called once a token."
OnTokens = Callable[[int, list[int]], None]
"A prompt's place in the list and its next tokens, at least one: as soon as they are known, and before ShouldStop."


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts_ids: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop_token: int | None = None,
    num_known_tokens: int | None = None,
    read_prompt: ReadPrompt | None = None,
    should_stop: ShouldStop | None = None,
    on_tokens: OnTokens | None = None,
    decoder: Decoder | None = None,
) -> list[list[int]]:
    """New token ids for each prompt, without the prompt and without the stop token; prompts may differ in length.

    temperature 0 takes the likeliest token. top_k 0 and top_p 1 leave every token possible. A prompt's text depends on
    its seed, not on the other prompts; one number stands for itself and those after it, one for each prompt.
    Generation of a prompt ends at stop_token (None: never), after the token at which should_stop says so, or after
    max_new_tokens. Only ids below num_known_tokens are drawn, those of a tokenizer smaller than the model's vocabulary
    (None: all).

    Each prompt's tokens are handed to on_tokens as they come, for those who show them; what it raises ends everything.
    read_prompt reads the prompts in the model's place. `decoder` takes the steps (None: the model, call by call), and
    may serve many calls; build_decoder gives the fastest one. It changes no token.
    Raises ValueError for a setting out of range, no prompt, an empty prompt or an unknown id.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1; use a positive number")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, num_known_tokens=num_known_tokens)
    _check_prompts(prompts_ids, model.config.vocab_size)
    seeds = [seed + row for row in range(len(prompts_ids))] if isinstance(seed, int) else list(seed)
    if len(seeds) != len(prompts_ids):
        raise ValueError(
            f"seed={seeds} must be one number, or one for each of {len(prompts_ids)} prompts; leave it out"
        )
    decoder = decoder or EagerDecoder(model)
    texts = _Texts(len(prompts_ids), stop_token, should_stop, on_tokens)
    logits_B1V, state = _read(prompts_ids, find_device(model), read_prompt or partial(read_in_pieces, model))
    try:
        first_B = decoder.start(logits_B1V[:, -1], state, sampling, UniformNumbers(seeds))
        del logits_B1V, state  # the decoder's from here on
        for tokens in iterate_tokens(decoder, first_B, max_new_tokens):
            texts.append(tokens)
            if texts.all_ended:
                break
    finally:
        decoder.release()
    return texts.tokens


def _read(prompts_ids: list[list[int]], device: torch.device, read_prompt: ReadPrompt) -> tuple[Tensor, DecodeState]:
    input_ids_BT, document_start_BT = pad_left(prompts_ids)
    return read_prompt(input_ids_BT.to(device), document_start_BT.to(device))


class _Texts:
    """The tokens of every prompt so far, and which have come to their end."""

    def __init__(
        self,
        num_prompts: int,
        stop_token: int | None,
        should_stop: ShouldStop | None,
        on_tokens: OnTokens | None,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_prompts)]
        self.ended = [False] * num_prompts
        self.stop_token, self.should_stop, self.on_tokens = stop_token, should_stop, on_tokens

    @property
    def all_ended(self) -> bool:
        return all(self.ended)

    def append(self, tokens: list[int]) -> None:
        for row, token in enumerate(tokens):
            self.ended[row] = self.ended[row] or token == self.stop_token
            if not self.ended[row]:
                self._append_to(row, token)

    def _append_to(self, row: int, token: int) -> None:
        self.tokens[row].append(token)
        if self.on_tokens is not None:
            self.on_tokens(row, [token])
        if self.should_stop is not None:
            self.ended[row] = self.should_stop(row, self.tokens[row])


def _check_prompts(prompts_ids: list[list[int]], vocab_size: int) -> None:
    if not prompts_ids or not all(prompts_ids):
        raise ValueError(f"prompts={prompts_ids} must hold at least one token each; begin each with the BOS token")
    highest, lowest = max(map(max, prompts_ids)), min(map(min, prompts_ids))
    if highest >= vocab_size or lowest < 0:
        wrong = highest if highest >= vocab_size else lowest
        raise ValueError(f"token id {wrong} must be below model.vocab_size={vocab_size}; use the model's tokenizer")
