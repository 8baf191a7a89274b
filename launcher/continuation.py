"""A trained run that continues prompts: its model, tokenizer and decoder, kept from one batch to the next."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from launcher.generate_stream import TextStream
from launcher.trained_run import TrainedRun
from prism_lm.model.decode_graph import build_decoder
from prism_lm.model.decode_state import DecodeState
from prism_lm.model.generate import ReadPrompt, generate
from prism_lm.model.prefill import read_in_pieces

OnText = Callable[[int, str], None]
"A prompt's place in the batch and the next part of its continuation."


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides a continuation, beside the prompt, its seed and the model."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stops: tuple[str, ...] = ()
    "Texts that end a continuation; neither they nor what follows is part of it."


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What follows a prompt. num_new_tokens counts the tokens that were made for it, those of a stop string too, the
    end of the document not."""

    text: str
    num_new_tokens: int
    finish_reason: Literal["stop", "length"]


@dataclass
class Speed:
    """Tokens and seconds, of reading prompts and of writing continuations."""

    prompt_tokens: int = 0
    prompt_s: float = 0.0
    new_tokens: int = 0
    new_s: float = 0.0
    capture_s: float = 0.0
    "Making CUDA graphs, once for each number of prompts."

    def describe(self) -> str:
        """One line for a terminal."""
        parts = (("prompts", self.prompt_tokens, self.prompt_s), ("new", self.new_tokens, self.new_s))
        words = [
            f"{name}: {tokens:,} tokens in {seconds:.2f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
            for name, tokens, seconds in parts
        ]
        return "; ".join([*words, f"CUDA graph made in {self.capture_s:.2f} s"] if self.capture_s else words)


class Continuer:
    """Continues prompts, each as the start of a document, up to the document's end."""

    def __init__(
        self, run: TrainedRun, settings: Settings, *, cuda_graph: bool = True, read_prompt: ReadPrompt | None = None
    ) -> None:
        self.trained, self.settings = run, settings
        self.decoder = build_decoder(run.model, cuda_graph=cuda_graph, on_capture=self._note_capture)
        self.read_prompt = read_prompt or partial(read_in_pieces, run.model)
        self._speed = Speed()

    def encode(self, prompt: str) -> list[int]:
        """The prompt's token ids, the first of them BOS."""
        return [self.trained.tokenizer.bos_id, *self.trained.tokenizer.encode(prompt)]

    def continue_batch(
        self, prompts: list[str], seeds: list[int], *, on_text: OnText | None = None
    ) -> list[Continuation]:
        """A continuation of each prompt, which depends on its seed and not on the other prompts."""
        streams = [TextStream(self.trained.tokenizer.decode, self.settings.stops) for _ in prompts]
        prompts_ids = [self.encode(prompt) for prompt in prompts]
        if self.settings.stops or on_text is not None:
            tokens = self._generate(prompts_ids, seeds, streams, on_text)
        else:
            tokens = self._generate(prompts_ids, seeds)
            for stream, new in zip(streams, tokens, strict=True):
                stream.add(new)
        for row, stream in enumerate(streams):
            rest = stream.finish()
            if rest and on_text is not None:
                on_text(row, rest)
        return [self._describe(stream, len(new)) for stream, new in zip(streams, tokens, strict=True)]

    def take_speed(self) -> Speed:
        """That of all batches since the last call."""
        speed, self._speed = self._speed, Speed()
        return speed

    def _generate(
        self,
        prompts_ids: list[list[int]],
        seeds: list[int],
        streams: list[TextStream] | None = None,
        on_text: OnText | None = None,
    ) -> list[list[int]]:
        def feed(row: int, tokens: list[int]) -> None:
            text = streams[row].add(tokens) if streams else ""
            if text and on_text is not None:
                on_text(row, text)

        speed, started_s = self._speed, time.perf_counter()
        before_s = speed.prompt_s + speed.capture_s
        tokens = generate(
            self.trained.model,
            prompts_ids,
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            top_k=self.settings.top_k,
            top_p=self.settings.top_p,
            seed=seeds,
            stop_token=self.trained.tokenizer.eos_id,
            num_known_tokens=self.trained.tokenizer.vocab_size,
            read_prompt=self._read_prompt,
            on_tokens=feed if streams else None,
            should_stop=(lambda row, _: streams[row].has_stopped) if streams else None,
            decoder=self.decoder,
        )
        speed.new_s += time.perf_counter() - started_s - (speed.prompt_s + speed.capture_s - before_s)
        speed.new_tokens += sum(map(len, tokens))
        speed.prompt_tokens += sum(map(len, prompts_ids))
        return tokens

    def _read_prompt(self, input_ids_BT: Tensor, document_start_BT: Tensor) -> tuple[Tensor, DecodeState]:
        """Read the prompts, and note how long it took."""
        started_s = time.perf_counter()
        read = self.read_prompt(input_ids_BT, document_start_BT)
        if input_ids_BT.is_cuda:
            torch.cuda.synchronize()
        self._speed.prompt_s += time.perf_counter() - started_s
        return read

    def _note_capture(self, seconds: float) -> None:
        self._speed.capture_s += seconds

    def _describe(self, stream: TextStream, num_new_tokens: int) -> Continuation:
        is_short = num_new_tokens < self.settings.max_new_tokens
        reason = "stop" if stream.has_stopped or is_short else "length"
        return Continuation(text=stream.text, num_new_tokens=num_new_tokens, finish_reason=reason)
