"""Text from a model: one prefill by the chunk form, then one step a token; recurrent layers keep a constant-size state.

Dims: B batch (prompts), T tokens, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from prism_lm.model.decode_state import DecodeState
from prism_lm.model.lm import LanguageModel

ReadPrompt = Callable[[Tensor, Tensor], tuple[Tensor, DecodeState]]
"Token ids and document starts, both BT, to the last token's logits (B, 1, V) and the state after it."


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts_ids: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token: int | None = None,
    num_known_tokens: int | None = None,
    read_prompt: ReadPrompt | None = None,
) -> list[list[int]]:
    """New token ids for each prompt, without the prompt and without the stop token; prompts may differ in length.

    temperature 0 takes the likeliest token. top_k 0 and top_p 1 leave every token possible. A prompt's text depends on
    the seed and its place in the list, not on the other prompts. Generation of a prompt ends at stop_token (None:
    never) or after max_new_tokens. Only ids below num_known_tokens are drawn, those of a tokenizer smaller than the
    model's vocabulary (None: all). read_prompt reads the prompts in the model's place, which takes the steps.
    Raises ValueError for a setting out of range, no prompt, an empty prompt or an unknown id.
    """
    _check_settings(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    _check_prompts(prompts_ids, model.config.vocab_size)
    device = next(model.parameters()).device
    input_ids_BT, document_start_BT = pad_left(prompts_ids)
    read_prompt = read_prompt or partial(_read_whole, model)
    logits_BTV, state = read_prompt(input_ids_BT.to(device), document_start_BT.to(device))
    generators = [torch.Generator().manual_seed(seed + row) for row in range(len(prompts_ids))]
    texts = _Texts(len(prompts_ids), stop_token)
    for remaining in range(max_new_tokens - 1, -1, -1):
        filtered_BV = filter_logits(
            logits_BTV[:, -1, :num_known_tokens], temperature=temperature, top_k=top_k, top_p=top_p
        )
        token_B = sample(filtered_BV, generators)
        texts.append(token_B.tolist())
        if texts.all_ended or not remaining:
            break
        logits_BTV, state = model.logits(token_B[:, None], state=state, last_only=True)
    return texts.tokens


def _read_whole(model: LanguageModel, input_ids_BT: Tensor, document_start_BT: Tensor) -> tuple[Tensor, DecodeState]:
    return model.logits(input_ids_BT, document_start_BT=document_start_BT, last_only=True)


def pad_left(prompts_ids: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Prompts as one batch, int64 BT and bool BT, all ending in the last column. Padding (id 0) is another document
    than the prompt after it, so that no layer lets the prompt see it."""
    num_tokens = max(len(prompt) for prompt in prompts_ids)
    input_ids_BT = torch.zeros(len(prompts_ids), num_tokens, dtype=torch.int64)
    document_start_BT = torch.zeros(len(prompts_ids), num_tokens, dtype=torch.bool)
    for row, prompt in enumerate(prompts_ids):
        first = num_tokens - len(prompt)
        input_ids_BT[row, first:] = torch.tensor(prompt)
        document_start_BT[row, first] = True
    return input_ids_BT, document_start_BT


def filter_logits(logits_BV: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Logits to sample from: divided by the temperature, -inf outside the top_k likeliest tokens and outside the
    smallest set of likeliest tokens whose probability reaches top_p. Temperature 0 leaves the likeliest alone."""
    if temperature == 0:
        return _keep_top_k(logits_BV, 1)
    logits_BV = logits_BV / temperature
    if 0 < top_k < logits_BV.shape[-1]:
        logits_BV = _keep_top_k(logits_BV, top_k)
    return _keep_top_p(logits_BV, top_p) if top_p < 1 else logits_BV


def sample(logits_BV: Tensor, generators: list[torch.Generator]) -> Tensor:
    """One token a row, int64 B, drawn by inverting the cumulative probability at one uniform number of the row's
    generator. Tokens of probability 0 are never drawn."""
    cumulative_BV = logits_BV.double().softmax(-1).cumsum(-1)
    uniform_B = torch.cat([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    threshold_B1 = uniform_B.to(logits_BV.device)[:, None] * cumulative_BV[:, -1:]
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


class _Texts:
    """The tokens of every prompt so far, and which have met the stop token."""

    def __init__(self, num_prompts: int, stop_token: int | None) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_prompts)]
        self.ended = [False] * num_prompts
        self.stop_token = stop_token

    @property
    def all_ended(self) -> bool:
        return all(self.ended)

    def append(self, tokens: list[int]) -> None:
        for row, token in enumerate(tokens):
            self.ended[row] = self.ended[row] or token == self.stop_token
            if not self.ended[row]:
                self.tokens[row].append(token)


def _check_settings(*, max_new_tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1; use a positive number")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be at least 0; use 0 for the likeliest token")
    if top_k < 0:
        raise ValueError(f"top_k={top_k} must be at least 0; use 0 for all tokens")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1; use 1 for all tokens")


def _check_prompts(prompts_ids: list[list[int]], vocab_size: int) -> None:
    if not prompts_ids or not all(prompts_ids):
        raise ValueError(f"prompts={prompts_ids} must hold at least one token each; begin each with the BOS token")
    highest, lowest = max(map(max, prompts_ids)), min(map(min, prompts_ids))
    if highest >= vocab_size or lowest < 0:
        wrong = highest if highest >= vocab_size else lowest
        raise ValueError(f"token id {wrong} must be below model.vocab_size={vocab_size}; use the model's tokenizer")
