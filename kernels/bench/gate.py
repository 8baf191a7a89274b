"""Nothing is timed that is wrong: each operator on short rows against its fp64 reference, in seconds.

The whole proof is `make test-gpu`; this finds a broken kernel or compiler before its speed is believed.
"""

from collections.abc import Callable

import torch

from kernels.bench.bounds import ScanShape
from kernels.bench.cases import CHANNELS, EPS, TAPS, WIDTH, Options, build_scan_leaves, run_scan
from kernels.bench.measure import Leaves

# Relative errors in bf16: outputs, gradients.
OUTPUT_LIMIT, GRADIENT_LIMIT = 5e-3, 8e-3
GATE_TOKENS = 100
ALL_STEPS = (0, 1, 2, 3, 4)


def check_operators(options: Options) -> list[str]:
    """What is wrong with the operators that the options name; nothing if all are right."""
    checks = {"scan": check_scan, "lengths": check_scan, "step": check_step, "short_conv": check_short_conv,
              "gated_norm": check_gated_norm}  # fmt: skip
    wrong = []
    for check in dict.fromkeys(checks[operator] for operator in options.operators):
        wrong += check(options)
    return wrong


def check_scan(options: Options) -> list[str]:
    """The scan for every L that will be timed, on rows that end inside a chunk."""
    from kernels.prism.reference import prism_scan_reference

    def run_reference(leaves: Leaves) -> torch.Tensor:
        return prism_scan_reference(*leaves)[0]

    wrong = []
    for L in options.choose_steps(ALL_STEPS):
        leaves = build_scan_leaves(ScanShape(B=2, T=GATE_TOKENS, H=3, L=L), L)
        wrong += compare(f"scan L={L}", run_scan, run_reference, leaves)
    return wrong


@torch.no_grad()
def check_step(options: Options) -> list[str]:
    """The decode step for every L that will be timed."""
    from kernels.bench.decode import build_token
    from kernels.prism.step import prism_step
    from kernels.prism.step_reference import prism_step_reference

    wrong = []
    for L in options.choose_steps(ALL_STEPS):
        *token, state = build_token(2, L, L)
        wide = [None if x is None else x.double() for x in token]
        actual = prism_step(*token, state_BHVK=state)
        expected = prism_step_reference(*wide, state_BHVK=state.double())
        wrong += judge(f"step L={L}", actual, expected, (OUTPUT_LIMIT, OUTPUT_LIMIT))
    return wrong


def check_short_conv(options: Options) -> list[str]:
    """The short convolution."""
    from kernels.short_conv.fused import short_conv
    from kernels.short_conv.reference import short_conv_reference

    x_BTD, weight_DW = _normal(2, GATE_TOKENS, CHANNELS), _normal(CHANNELS, TAPS)
    return compare("short_conv", lambda x: short_conv(*x)[0], lambda x: short_conv_reference(*x)[0], [x_BTD, weight_DW])


def check_gated_norm(options: Options) -> list[str]:
    """The gated norm."""
    from kernels.gated_norm.fused import gated_rms_norm
    from kernels.gated_norm.reference import gated_rms_norm_reference

    leaves = [_normal(2, GATE_TOKENS, WIDTH), _normal(2, GATE_TOKENS, WIDTH), _normal(WIDTH)]
    return compare(
        "gated_norm",
        lambda x: gated_rms_norm(*x, eps=EPS),
        lambda x: gated_rms_norm_reference(*x, eps=EPS),
        leaves,
    )


def _normal(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, device="cuda", dtype=torch.bfloat16).requires_grad_()


def compare(name: str, forward: Callable, reference: Callable, leaves: Leaves) -> list[str]:
    """Errors of the output and of every gradient against the reference in fp64 that exceed their limits."""
    wide = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    out, expected = forward(leaves), reference(wide)
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, [x for x in leaves if x is not None], grad_out)
    expected_grads = torch.autograd.grad(expected, [x for x in wide if x is not None], grad_out.double())
    limits = (OUTPUT_LIMIT, *(GRADIENT_LIMIT for _ in grads))
    return judge(name, (out, *grads), (expected, *expected_grads), limits)


def judge(name: str, actual: tuple, expected: tuple, limits: tuple[float, ...]) -> list[str]:
    """A line for every result whose relative error exceeds its limit."""
    wrong = []
    for i, (got, wanted, limit) in enumerate(zip(actual, expected, limits, strict=True)):
        error = ((got.double() - wanted).norm() / wanted.norm()).item()
        if not error <= limit:
            wrong.append(f"{name}: result {i} has a relative error of {error:.2e}, more than {limit:.0e}")
    return wrong
