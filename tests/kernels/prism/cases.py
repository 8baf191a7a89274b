"""Inputs of the scan for tests: random, with the ranges the contract states, in fp64 unless cast."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Case:
    """Arguments of a scan; `tensors` are query, key, residual, gain, step size, log decay, as the scan takes them."""

    tensors: list[torch.Tensor | None]
    entry_state: torch.Tensor | None
    document_start: torch.Tensor | None

    def leaves(self) -> list[torch.Tensor]:
        return [tensor for tensor in (*self.tensors, self.entry_state) if tensor is not None]

    def cast(self, dtype: torch.dtype, device: str | None = None) -> "Case":
        """In `dtype` on `device` (None: where it is), as new leaves."""

        def convert(tensor):
            return None if tensor is None else tensor.detach().to(device=device, dtype=dtype).requires_grad_()

        start = None if self.document_start is None else self.document_start.to(device=device)
        return Case([convert(x) for x in self.tensors], convert(self.entry_state), start)

    def cast_as_model(self, dtype: torch.dtype) -> "Case":
        """Step sizes, log decays and entry state in fp32, the rest in `dtype`, as a mixer passes them."""
        narrow, wide = self.cast(dtype), self.cast(torch.float32)
        return Case([*narrow.tensors[:4], *wide.tensors[4:]], wide.entry_state, self.document_start)

    def run(self, scan: Callable, **options) -> list[torch.Tensor]:
        """Output, final state, then the gradient of every leaf of a fixed random function of both.

        The weights of that function are bf16 numbers: no dtype rounds them as it takes the output's gradient.
        """
        leaves = self.leaves()
        state = {"entry_state_BHVK": self.entry_state, "document_start_BT": self.document_start}
        out, final = scan(*self.tensors, **state, **options)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=generator).bfloat16().double() for x in (out, final)]
        loss = sum((x.double() * weight.to(x.device)).sum() for x, weight in zip((out, final), weights, strict=True))
        return [out.detach(), final.detach(), *torch.autograd.grad(loss, leaves)]


def build_case(
    L: int,
    T: int,
    *,
    B: int = 2,
    H: int = 2,
    K: int = 6,
    V: int = 5,
    decay: float | str = -0.1,
    packed: bool = True,
    cosine: float = 0.0,
) -> Case:
    """Log decays are spread from `decay` to zero, or are those of `build_log_decay`; `packed` adds document starts and
    an entry state. With a `cosine`, that is about what any two keys of a head have, and step sizes are about 0.99."""
    generator, M = torch.Generator().manual_seed(T + 1000 * L), max(L, 1)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    log_decay = build_log_decay(decay, (B, T, H), generator)
    direction = (cosine / (1 - cosine)) ** 0.5 * normal(B, 1, 1, H, K) if cosine else 0
    tensors = [
        normal(B, T, H, K),
        F.normalize(direction + normal(B, T, M, H, K), dim=-1),
        normal(B, T, H, V),
        normal(B, T, L, H, V) if L else None,
        (normal(B, T, M, H) + (5 if cosine else 0)).sigmoid(),
        log_decay,
    ]
    entry_state = normal(B, H, V, K)
    case = Case(tensors, entry_state if packed else None, build_document_starts(B, T) if packed else None)
    return case.cast(torch.float64)


def build_log_decay(decay: float | str, sizes: tuple[int, int, int], generator: torch.Generator) -> torch.Tensor:
    """(B, T, H): from `decay` to zero at random; or "strong", -20 everywhere; "vanishing", an alpha of 0 everywhere;
    "mixed", a third of the tokens of a head -20 or -2000 and the rest weak."""
    share = torch.rand(sizes, generator=generator, dtype=torch.float64)
    if decay == "mixed":
        return torch.where(share < 1 / 6, -20.0, torch.where(share < 1 / 3, -2000.0, -0.1 * share))
    constants = {"strong": -20.0, "vanishing": -1e4}
    return torch.full(sizes, constants[decay], dtype=torch.float64) if isinstance(decay, str) else decay * share


def build_document_starts(B: int, T: int) -> torch.Tensor:
    """Even rows begin a document at once, at chunk edges and beside them; odd rows continue one and pack several."""
    start_BT = torch.zeros(B, T, dtype=torch.bool)
    for row, tokens in ((0, (0, 16, 64, 65, 70, 128)), (1, (3, 5, 6, 100))):
        start_BT[row::2, [t for t in tokens if t < T]] = True
    return start_BT


def name_results(case: Case) -> list[str]:
    """Names of what `Case.run` returns."""
    names = ["query", "key", "residual", "gain", "step_size", "log_decay"]
    given = [name for name, tensor in zip(names, case.tensors, strict=True) if tensor is not None]
    entry = [] if case.entry_state is None else ["entry_state"]
    return ["out", "final_state", *(f"grad_{name}" for name in (*given, *entry))]
