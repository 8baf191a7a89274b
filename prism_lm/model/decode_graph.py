"""The decode step as one CUDA graph: embedding, layers, head, sampling, and the recurrent state advanced where it lies.

A step of small kernels takes the host far longer to launch than the GPU to run; a graph is launched as one. Everything
it reads and writes stays at one address: the token, the state, the uniform numbers and which of them is next.

Dims: B batch, V vocabulary, H heads, K key width, D conv channels, W conv taps less one, N uniform numbers drawn ahead.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from prism_lm.model.config import Mixer
from prism_lm.model.decode_state import DecodeState, LayerState, RecurrentState
from prism_lm.model.decoder import Decoder, EagerDecoder, choose_lag, find_device
from prism_lm.model.lm import LanguageModel
from prism_lm.model.sampling import BLOCK_NUMBERS, Sampling, UniformNumbers
from prism_lm.model.token_operators import TokenOperators, find_runners

WARM_UP_STEPS = 3
CAPTURED_MIXERS: frozenset[Mixer] = frozenset({"prism", "gated_delta", "linear_attention"})
"Those whose state is a scan's and a convolution's, which token_operators.py advances in place."

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"Calls a step some times, then gives what repeats it."
OnCapture = Callable[[float], None]
"The seconds that a capture took."


def build_decoder(model: LanguageModel, *, cuda_graph: bool = True, on_capture: OnCapture | None = None) -> Decoder:
    """The fastest decoder for a model: a CUDA graph where it can be one, unless told otherwise.

    Kept between calls of `generate` it captures once for each number of prompts and setting that follows another; the
    memory of one step and of one state stays allocated with it. Weights may change, but must stay where they are.
    """
    return GraphDecoder(model, on_capture=on_capture) if cuda_graph and can_be_captured(model) else EagerDecoder(model)


def can_be_captured(model: LanguageModel) -> bool:
    """Whether a step is the same work at the same addresses for every token: on CUDA, by scans alone."""
    is_scan = CAPTURED_MIXERS.issuperset(model.config.layer_mixers())
    return find_device(model).type == "cuda" and is_scan and all(runner.step for runner in find_runners(model))


def capture_cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph. It runs first, on a stream of its own, so that kernels are compiled and libraries have
    made their workspaces."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events from a thread of its own, which only this mode lets it do.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


class GraphDecoder:
    """Replays a captured step; recurrent layers only. The latest graph is kept, for as many rows and the same sampling
    as before."""

    def __init__(
        self, model: LanguageModel, *, capture: Capture = capture_cuda_graph, on_capture: OnCapture | None = None
    ) -> None:
        self.model, self.capture, self.on_capture = model, capture, on_capture
        self.lag_tokens = choose_lag(find_device(model))
        self.num_captures = 0
        self._step: _CapturedStep | None = None

    def start(self, logits_BV: Tensor, state: DecodeState, sampling: Sampling, numbers: UniformNumbers) -> Tensor:
        if self._step is None or not self._step.fits(logits_BV.shape[0], sampling):
            self._step = None  # its memory is free for the next
            started_s = time.perf_counter()
            self._step = _CapturedStep(self.model, state, sampling, self.capture)
            self.num_captures += 1
            if self.on_capture is not None:
                self.on_capture(time.perf_counter() - started_s)
        return self._step.load(logits_BV, state, numbers)

    def advance(self) -> Tensor:
        assert self._step is not None, "start() comes first"
        return self._step.advance()

    def release(self) -> None:
        pass


class _Buffers(NamedTuple):
    """What a step reads and writes, and the place of the uniform number that is next."""

    token_B: Tensor
    state: DecodeState
    uniform_NB: Tensor
    place_1: Tensor


class _CapturedStep:
    """One step, its buffers, and how many of the uniform numbers in them were used."""

    def __init__(self, model: LanguageModel, state: DecodeState, sampling: Sampling, capture: Capture) -> None:
        device, num_rows = find_device(model), state.layers[0][0].shape[0]
        self.sampling = sampling
        self.buffers = _Buffers(
            token_B=torch.zeros(num_rows, dtype=torch.int64, device=device),
            state=DecodeState(layers=tuple(map(_copy_layer, state.layers))),
            uniform_NB=torch.zeros(BLOCK_NUMBERS, num_rows, dtype=torch.float64, device=device),
            place_1=torch.zeros(1, dtype=torch.int64, device=device),
        )
        operators = TokenOperators(model)
        self.replay = capture(lambda: _take_step(model, operators, sampling, self.buffers))

    def fits(self, num_rows: int, sampling: Sampling) -> bool:
        return self.buffers.token_B.shape[0] == num_rows and self.sampling == sampling

    def load(self, logits_BV: Tensor, state: DecodeState, numbers: UniformNumbers) -> Tensor:
        """Begin other rows: the first token of each."""
        self._numbers = numbers
        for kept, given in zip(self._iterate(self.buffers.state), self._iterate(state), strict=True):
            kept.copy_(given)
        self._refill()
        self.buffers.token_B.copy_(self.sampling.draw(logits_BV, self.buffers.uniform_NB[0]))
        self._skip(1)
        return self.buffers.token_B

    def advance(self) -> Tensor:
        if self._num_used == BLOCK_NUMBERS:
            self._refill()
        self.replay()
        self._num_used += 1
        return self.buffers.token_B

    def _refill(self) -> None:
        self.buffers.uniform_NB.copy_(self._numbers.draw(self.buffers.uniform_NB.device))
        self._skip(0)

    def _skip(self, count: int) -> None:
        self.buffers.place_1.fill_(count)
        self._num_used = count

    def _iterate(self, state: DecodeState) -> Iterator[Tensor]:
        return (tensor for layer in state.layers for tensor in layer if tensor is not None)


def _copy_layer(layer: LayerState) -> RecurrentState:
    """A layer's state in memory of its own."""
    assert isinstance(layer, RecurrentState), "only the state of a scan can be captured"
    window_BWD = layer.window_BWD
    return RecurrentState(
        layer.state_BHVK.clone(memory_format=torch.contiguous_format),
        None if window_BWD is None else window_BWD.clone(memory_format=torch.contiguous_format),
    )


def _take_step(model: LanguageModel, operators: TokenOperators, sampling: Sampling, buffers: _Buffers) -> None:
    """The next token and state, written over the last."""
    with operators.use():
        logits_B1V, _ = model.logits(buffers.token_B[:, None], state=buffers.state, last_only=True)
    uniform_B = buffers.uniform_NB.index_select(0, buffers.place_1)[0]
    buffers.token_B.copy_(sampling.draw(logits_B1V[:, -1], uniform_B))
    buffers.place_1.add_(1)
