"""What is timed: operators with shapes and fresh inputs, each beside the peers that take the same inputs.

Inputs have the ranges of the contract: keys of norm 1, log decay = logsigmoid(normal), step sizes = sigmoid(normal).
Of one shape and seed, every L has the same queries, residuals, decays and first pair, which is what a rank-1 peer gets.

Dims: B batch, T tokens, H heads, K key width, V value width, L solver steps, M written pairs, D channels, W conv taps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.bench import peers
from kernels.bench.bounds import (
    Ceilings,
    ScanShape,
    count_backward_bytes,
    count_backward_flops,
    count_forward_bytes,
    count_forward_flops,
)
from kernels.bench.measure import Forward, Leaves, Measured, count_bytes, count_sets, measure

SCAN_SHAPES = ((1, 32768, 16), (8, 4096, 16), (1, 32768, 32))
LENGTHS_TOKENS = tuple(2**power for power in range(11, 21))
QUICK_LENGTHS_TOKENS = (2048, 32768)
ROW_TOKENS = 32768
ALL_SOLVER_STEPS, LENGTHS_SOLVER_STEPS = (0, 1, 2, 3, 4), (1, 2)
CHANNELS, TAPS, HEADS, WIDTH = 2048, 4, 16, 128
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line asks for; None: everything of its kind."""

    operators: tuple[str, ...]
    shapes: tuple[tuple[int, int, int], ...] | None = None
    solver_steps: tuple[int, ...] | None = None
    has_peers: bool = True
    is_quick: bool = False

    @property
    def rep_ms(self) -> int:
        return 20 if self.is_quick else 200

    def choose_shapes(self) -> tuple[tuple[int, int, int], ...]:
        return self.shapes or (SCAN_SHAPES[:1] if self.is_quick else SCAN_SHAPES)

    def choose_steps(self, default: tuple[int, ...]) -> tuple[int, ...]:
        return self.solver_steps or ((1, 2) if self.is_quick else default)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table. Lines of one operator and shape are compared with its baseline, which comes first."""

    operator: str
    shape: str
    name: str
    run: Callable[[], Measured]
    is_baseline: bool = False
    forward_bound_ms: float | None = None
    both_bound_ms: float | None = None


def build_cases(options: Options, ceilings: Ceilings) -> Iterator[Case]:
    """Every line that the options ask for, in the table's order."""
    from kernels.bench.decode import build_step_cases

    builders = {
        "scan": build_scan_cases,
        "lengths": build_length_cases,
        "step": build_step_cases,
        "short_conv": build_short_conv_cases,
        "gated_norm": build_gated_norm_cases,
    }
    for operator in options.operators:
        yield from builders[operator](options, ceilings)


def build_scan_cases(options: Options, ceilings: Ceilings) -> Iterator[Case]:
    """The scan at fixed shapes, for every L."""
    for B, T, H in options.choose_shapes():
        steps = options.choose_steps(ALL_SOLVER_STEPS)
        yield from _build_shape_cases("scan", (B, T, H), steps, options, ceilings)


def build_length_cases(options: Options, ceilings: Ceilings) -> Iterator[Case]:
    """The scan from 2K to 1M tokens a row, rows filled up to 32K tokens."""
    for T in QUICK_LENGTHS_TOKENS if options.is_quick else LENGTHS_TOKENS:
        steps = options.choose_steps(LENGTHS_SOLVER_STEPS)
        yield from _build_shape_cases("lengths", (max(1, ROW_TOKENS // T), T, HEADS), steps, options, ceilings)


def _build_shape_cases(
    operator: str, sizes: tuple[int, int, int], steps: tuple[int, ...], options: Options, ceilings: Ceilings
) -> Iterator[Case]:
    B, T, H = sizes
    label = f"{B} x {T} H{H}"
    for peer in peers.SCAN_PEERS if options.has_peers else ():
        shape = ScanShape(B=B, T=T, H=H, L=peer.solver_steps)
        yield Case(
            operator=operator,
            shape=label,
            name=peer.name,
            is_baseline=peer.is_baseline,
            run=lambda peer=peer, shape=shape: _run_peer(peer, shape, options.rep_ms),
        )
    for L in steps:
        shape = ScanShape(B=B, T=T, H=H, L=L)
        forward_ms, both_ms = compute_scan_bounds(shape, ceilings)
        yield Case(
            operator=operator,
            shape=label,
            name=f"prism L={L}",
            forward_bound_ms=forward_ms,
            both_bound_ms=both_ms,
            run=lambda shape=shape: _run_sets(run_scan, lambda i: build_scan_leaves(shape, i), options.rep_ms),
        )


def compute_scan_bounds(shape: ScanShape, ceilings: Ceilings) -> tuple[float | None, float | None]:
    """The shortest forward, and forward with backward, in milliseconds."""
    count = shape.tokens * shape.H
    forward_bytes, forward_flops = count_forward_bytes(shape), count_forward_flops(shape)
    backward_bytes, backward_flops = count_backward_bytes(shape), count_backward_flops(shape)
    forward_ms = ceilings.compute_bound_ms(count * forward_bytes, count * forward_flops)
    backward_ms = ceilings.compute_bound_ms(count * backward_bytes, count * backward_flops)
    return forward_ms, None if forward_ms is None or backward_ms is None else forward_ms + backward_ms


def build_scan_leaves(shape: ScanShape, seed: int) -> list[torch.Tensor | None]:
    """Query, key, residual, gain, step size and log decay, as the scan takes them: bf16, the last two fp32."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(width: int | None, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        sizes = (shape.B, shape.T, shape.H) if width is None else (shape.B, shape.T, shape.H, width)
        return torch.randn(sizes, generator=generator, device="cuda", dtype=dtype)

    query, residual = normal(shape.K), normal(shape.V)
    log_decay = F.logsigmoid(normal(None, torch.float32))
    keys, gains, step_sizes = [], [], []
    for _ in range(shape.M):
        keys.append(F.normalize(normal(shape.K), dim=-1))
        step_sizes.append(normal(None, torch.float32).sigmoid())
        gains.append(normal(shape.V))
    gain = torch.stack(gains, 2) if shape.L else None
    leaves = [query, torch.stack(keys, 2), residual, gain, torch.stack(step_sizes, 2), log_decay]
    return [None if x is None else x.requires_grad_() for x in leaves]


def run_scan(leaves: Leaves) -> torch.Tensor:
    """The output of the Triton scan."""
    from kernels.prism.chunk import prism_scan

    return prism_scan(*leaves)[0]


def _run_peer(peer: peers.Peer, shape: ScanShape, rep_ms: int) -> Measured:
    if peer.max_tokens < shape.T:
        return Measured(absent=f"not run beyond {peer.max_tokens} tokens a row")
    return _run_sets(peer.forward, lambda i: peer.prepare(build_scan_leaves(shape, i)), rep_ms)


def _run_sets(forward: Forward, build: Callable[[int], Leaves], rep_ms: int) -> Measured:
    """Build as many sets of inputs as the L2 cache cannot hold, and measure on them."""
    try:
        sets: list[Sequence] = [build(0)]
        sets += [build(i) for i in range(1, count_sets(count_bytes(sets[0])))]
    except torch.OutOfMemoryError:
        return Measured(absent="its inputs do not fit in memory")
    return measure(forward, sets, has_backward=True, rep_ms=rep_ms)


def build_short_conv_cases(options: Options, ceilings: Ceilings) -> Iterator[Case]:
    """The short convolution at 2048 channels: reads and writes rows once forward, three of them backward."""

    def run_plain(leaves: Leaves) -> torch.Tensor:
        from kernels.short_conv.shifted import short_conv_shifted

        return short_conv_shifted(*leaves)[0]

    def run_fused(leaves: Leaves) -> torch.Tensor:
        from kernels.short_conv.fused import short_conv

        return short_conv(*leaves)[0]

    def build(seed: int) -> Leaves:
        generator = torch.Generator("cuda").manual_seed(seed)
        x_BTD = torch.randn(1, ROW_TOKENS, CHANNELS, generator=generator, device="cuda", dtype=torch.bfloat16)
        weight_DW = torch.randn(CHANNELS, TAPS, generator=generator, device="cuda")
        return [x_BTD.requires_grad_(), weight_DW.requires_grad_()]

    row_bytes = 2 * ROW_TOKENS * CHANNELS
    shape = f"1 x {ROW_TOKENS} D{CHANNELS} W{TAPS}"
    yield from _build_pair("short_conv", shape, (run_plain, run_fused), build, (2 * row_bytes, 3 * row_bytes),
                           options, ceilings)  # fmt: skip


def build_gated_norm_cases(options: Options, ceilings: Ceilings) -> Iterator[Case]:
    """The gated norm at 16 heads of 128: three rows forward, five backward."""

    def run_plain(leaves: Leaves) -> torch.Tensor:
        from kernels.gated_norm.explicit import gated_rms_norm_explicit

        return gated_rms_norm_explicit(*leaves, eps=EPS)

    def run_fused(leaves: Leaves) -> torch.Tensor:
        from kernels.gated_norm.fused import gated_rms_norm

        return gated_rms_norm(*leaves, eps=EPS)

    def build(seed: int) -> Leaves:
        generator = torch.Generator("cuda").manual_seed(seed)
        sizes = (2, 1, ROW_TOKENS, HEADS, WIDTH)
        x, gate = torch.randn(sizes, generator=generator, device="cuda", dtype=torch.bfloat16)
        weight_V = torch.randn(WIDTH, generator=generator, device="cuda")
        return [tensor.detach().requires_grad_() for tensor in (x, gate, weight_V)]

    row_bytes = 2 * ROW_TOKENS * HEADS * WIDTH
    shape = f"1 x {ROW_TOKENS} H{HEADS} V{WIDTH}"
    yield from _build_pair("gated_norm", shape, (run_plain, run_fused), build, (3 * row_bytes, 5 * row_bytes),
                           options, ceilings)  # fmt: skip


def _build_pair(
    operator: str,
    shape: str,
    forwards: tuple[Forward, Forward],
    build: Callable[[int], Leaves],
    num_bytes: tuple[int, int],
    options: Options,
    ceilings: Ceilings,
) -> Iterator[Case]:
    """The plain form as the baseline, then the fused one; their bounds are those of `num_bytes` in each direction."""
    for name, forward in zip(("plain torch", "prism"), forwards, strict=True):
        yield Case(
            operator=operator,
            shape=shape,
            name=name,
            is_baseline=name != "prism",
            forward_bound_ms=ceilings.compute_bound_ms(num_bytes[0]),
            both_bound_ms=ceilings.compute_bound_ms(sum(num_bytes)),
            run=lambda forward=forward: _run_sets(forward, build, options.rep_ms),
        )
