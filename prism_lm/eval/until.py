"""Texts generated up to a stop string, for many prompts at once, shared among the processes of a run.

Batches depend on the prompts alone, and each prompt has its seed: neither order nor number of processes matters.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from prism_lm.eval.batch_plan import Budget, pack, share_out
from prism_lm.eval.loglikelihood import measure_budget
from prism_lm.eval.progress import Progress, Share
from prism_lm.model.decode_graph import build_decoder
from prism_lm.model.generate import generate
from prism_lm.model.lm import LanguageModel
from prism_lm.model.prefill import read_in_pieces
from prism_lm.parallel.collectives import call_together, gather_objects
from prism_lm.parallel.mesh import Ranks

MOST_ROWS = 64
"Prompts of a batch: a step costs little more for many than for few, but every process should have a batch."
SLACK_TOKENS = 4
"Tokens before a stop string that are decoded with it: of characters in several pieces, or of no text at all."


class TextTokenizer(Protocol):
    """What evaluation asks of a tokenizer; encode adds no BOS, decode shows none."""

    @property
    def bos_id(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, /) -> list[int]: ...
    def decode(self, pieces: list[int], /) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How prompts are continued; those with equal settings share batches."""

    max_new_tokens: int
    until: tuple[str, ...] = ()
    "Strings that end a text; they and what follows are cut off."
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue; `seed` draws the numbers where the temperature is above 0."""

    tokens: list[int]
    settings: Settings
    seed: int


def generate_until(
    model: LanguageModel,
    tokenizer: TextTokenizer,
    prompts: Sequence[Prompt],
    *,
    batch_tokens: int,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """The text that continues each prompt, on every rank; the ranks share the work. All of them pass the same prompts.

    A text ends at EOS, at the first of its stop strings or after max_new_tokens. Raises RunFailed on all ranks for what
    fails on any.
    """
    ranks = ranks or Ranks()
    if not prompts:
        return []
    writer = _Writer(model, tokenizer, batch_tokens)
    texts, share = call_together(lambda: _generate_share(writer, prompts, ranks, progress))
    gathered = {place: text for part in gather_objects(texts) for place, text in part.items()}
    call_together(share.end)
    return [gathered[place] for place in range(len(prompts))]


def _generate_share(
    writer: "_Writer", prompts: Sequence[Prompt], ranks: Ranks, progress: Progress | None
) -> tuple[dict[int, str], Share]:
    batches = _plan(prompts, writer.budget)
    costs = [sum(_count_tokens(prompts[place]) for place in batch) for batch in batches]
    owners = share_out(costs, ranks.world_size)
    mine = [(batch, cost) for batch, cost, owner in zip(batches, costs, owners, strict=True) if owner == ranks.rank]
    own_tokens = sum(cost for _, cost in mine)
    share = Share(progress, "generate", num_requests=len(prompts), num_tokens=sum(costs), own_tokens=own_tokens)
    texts: dict[int, str] = {}
    for batch, cost in mine:
        texts |= zip(batch, writer.write([prompts[place] for place in batch]), strict=True)
        share.advance(cost)
    return texts, share


def _plan(prompts: Sequence[Prompt], budget: Budget) -> list[list[int]]:
    """Places of prompts that are continued together: equal settings, similar length, states that fit."""
    groups: dict[Settings, list[int]] = {}
    for place in sorted(range(len(prompts)), key=lambda place: (prompts[place].tokens, prompts[place].seed)):
        groups.setdefault(prompts[place].settings, []).append(place)
    ordered = sorted(groups.values(), key=lambda places: repr(prompts[places[0]].settings))
    batches = [part for places in ordered for part in pack(places, lambda place: _count_tokens(prompts[place]), budget)]
    return [batch[first : first + MOST_ROWS] for batch in batches for first in range(0, len(batch), MOST_ROWS)]


def _count_tokens(prompt: Prompt) -> int:
    return len(prompt.tokens) + prompt.settings.max_new_tokens


class _Writer:
    """Continues batches of prompts, which it reads at most batch_tokens at once."""

    def __init__(self, model: LanguageModel, tokenizer: TextTokenizer, batch_tokens: int) -> None:
        self.model, self.tokenizer, self.decoder = model, tokenizer, build_decoder(model)
        self.budget = replace(measure_budget(model, batch_tokens), batch_tokens=sys.maxsize)
        self.read_prompt = partial(read_in_pieces, model, piece_tokens=batch_tokens)

    def write(self, prompts: Sequence[Prompt]) -> list[str]:
        """Texts of prompts with equal settings."""
        settings = prompts[0].settings
        tail = max((len(stop.encode()) for stop in settings.until), default=0) + SLACK_TOKENS
        continuations = generate(
            self.model,
            [prompt.tokens for prompt in prompts],
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seed=[prompt.seed for prompt in prompts],
            stop_token=self.tokenizer.eos_id,
            num_known_tokens=min(self.tokenizer.vocab_size, self.model.config.vocab_size),
            read_prompt=self.read_prompt,
            should_stop=lambda _, tokens: contains_any(self.tokenizer.decode(tokens[-tail:]), settings.until),
            decoder=self.decoder,
        )
        return [cut_at_stops(self.tokenizer.decode(tokens), settings.until) for tokens in continuations]


def contains_any(text: str, stops: Sequence[str]) -> bool:
    """Whether one of the strings that are not empty is in the text."""
    return any(stop in text for stop in stops if stop)


def cut_at_stops(text: str, stops: Sequence[str]) -> str:
    """The text before each of the stop strings that are not empty, cut one after the other as the harness does it."""
    for stop in filter(None, stops):
        text = text.split(stop, maxsplit=1)[0]
    return text
