"""One decode token, bf16 inputs and an fp32 state: eager calls in a row, and replayed from a CUDA graph.

Dims: B batch, H heads, K key width, V value width, L solver steps.
"""

from collections.abc import Callable, Iterator

import torch

from kernels.bench import peers
from kernels.bench.bounds import Ceilings, ScanShape, count_step_bytes
from kernels.bench.cases import ALL_SOLVER_STEPS, HEADS, WIDTH, Case, Options, build_scan_leaves
from kernels.bench.measure import Measured, count_bytes, count_sets, measure_calls, measure_graph, shorten

BATCHES = (1, 64)
MODES = ("graph", "eager")

Inputs = tuple[torch.Tensor | None, ...]


def build_step_cases(options: Options, ceilings: Ceilings) -> Iterator[Case]:
    """Every batch size, in a graph and eager, the peer first; a graph shows the kernel, eager calls the host."""
    for B in BATCHES:
        for mode in MODES:
            if options.has_peers:
                yield _build_case(B, 1, mode, "fla recurrent", peers.run_recurrent_step, options, ceilings)
            for L in options.choose_steps(ALL_SOLVER_STEPS):
                yield _build_case(B, L, mode, f"prism L={L}", run_step, options, ceilings)


def _build_case(
    B: int, L: int, mode: str, name: str, call: Callable[[Inputs], object], options: Options, ceilings: Ceilings
) -> Case:
    is_peer = call is not run_step
    bound_ms = ceilings.compute_bound_ms(count_step_bytes(B, HEADS, WIDTH, WIDTH, max(L, 1)))
    build = build_peer_token if is_peer else build_token
    return Case(
        operator="step",
        shape=f"{B} H{HEADS} {mode}",
        name=name,
        is_baseline=is_peer,
        forward_bound_ms=bound_ms,
        run=lambda: _run(call, lambda seed: build(B, L, seed), mode),
    )


def _run(call: Callable[[Inputs], object], build: Callable[[int], Inputs], mode: str) -> Measured:
    first = build(0)
    sets = [first, *(build(seed) for seed in range(1, count_sets(count_bytes(first))))]
    try:
        with torch.no_grad():
            call(first)
        timing = measure_calls(call, sets) if mode == "eager" else measure_graph(call, sets)
    except Exception as error:  # a peer's code may refuse in any way
        return Measured(absent=shorten(error))
    return Measured(forward=timing)


def build_token(B: int, L: int, seed: int) -> Inputs:
    """The step's six inputs and its state."""
    leaves = build_scan_leaves(ScanShape(B=B, T=1, H=HEADS, L=L), seed)
    state_BHVK = torch.randn(B, HEADS, WIDTH, WIDTH, device="cuda")
    return (*(None if x is None else x.detach()[:, 0] for x in leaves), state_BHVK)


def build_peer_token(B: int, L: int, seed: int) -> Inputs:
    """The same of the first pair, with a token dim of 1."""
    leaves = peers.take_first_pair(build_scan_leaves(ScanShape(B=B, T=1, H=HEADS, L=L), seed))
    return (*(x.detach() for x in leaves), torch.randn(B, HEADS, WIDTH, WIDTH, device="cuda"))


def run_step(inputs: Inputs) -> object:
    """Our step, which advances its state in place."""
    from kernels.prism.step import prism_step

    *token, state_BHVK = inputs
    return prism_step(*token, state_BHVK=state_BHVK, out_state_BHVK=state_BHVK)
