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

    def cast(self, dtype: torch.dtype, device: str = "cpu") -> "Case":
        def convert(tensor):
            return None if tensor is None else tensor.detach().to(device, dtype).requires_grad_()

        start = None if self.document_start is None else self.document_start.to(device)
        return Case([convert(x) for x in self.tensors], convert(self.entry_state), start)

    def run(self, scan: Callable, **options) -> list[torch.Tensor]:
        """Output, final state, then the gradient of every leaf of a fixed random function of both."""
        leaves = self.leaves()
        state = {"entry_state_BHVK": self.entry_state, "document_start_BT": self.document_start}
        out, final = scan(*self.tensors, **state, **options)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, final)]
        loss = sum((x.double() * weight.to(x.device)).sum() for x, weight in zip((out, final), weights, strict=True))
        return [out.detach(), final.detach(), *torch.autograd.grad(loss, leaves)]


def build_case(
    L: int, T: int, *, B: int = 2, H: int = 2, K: int = 6, V: int = 5, decay: float = -0.1, packed: bool = True
) -> Case:
    """Log decays are spread from `decay` to zero; `packed` adds document starts and an entry state."""
    generator, M = torch.Generator().manual_seed(T + 1000 * L), max(L, 1)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    log_decay = decay * torch.rand(B, T, H, generator=generator, dtype=torch.float64)
    tensors = [
        normal(B, T, H, K),
        F.normalize(normal(B, T, M, H, K), dim=-1),
        normal(B, T, H, V),
        normal(B, T, L, H, V) if L else None,
        normal(B, T, M, H).sigmoid(),
        log_decay,
    ]
    entry_state = normal(B, H, V, K)
    case = Case(tensors, entry_state if packed else None, build_document_starts(B, T) if packed else None)
    return case.cast(torch.float64)


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
