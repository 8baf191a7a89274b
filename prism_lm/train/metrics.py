"""Figures of a run: rates over an interval, the share of a GPU's peak, and histograms of what mixers do."""

import resource
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Dense bf16 peaks in FLOP/s by a part of the name CUDA reports (vendor data sheets); the first match counts.
PEAK_BF16_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
OBSERVED_MODULES = ("decay", "step_sizes", "mixer")


def find_peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak in FLOP/s; None for a CPU, an unknown GPU, or fp32, whose rate depends on TF32 settings."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16_FLOPS.items() if part in name), None)


class Meter:
    """Speed since the last reading, without the time spent in `paused` blocks."""

    def __init__(
        self,
        *,
        total_steps: int,
        flops_per_token: float | None,
        peak_flops: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """peak_flops is that of all devices together, in FLOP/s."""
        self._total_steps = total_steps
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._clock = clock
        self.waited_s = 0.0
        "Spent in `waiting` blocks in all, over all intervals."
        self.paused_s = 0.0
        "The same, in `paused` blocks."
        self.start(step=0, tokens=0)

    def start(self, *, step: int, tokens: int) -> None:
        """Begins an interval at this place of the run."""
        self._step, self._tokens = step, tokens
        self._started_s = self._clock()
        self._waited_before_s, self._paused_before_s = self.waited_s, self.paused_s

    @contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """The block waits for data."""
        began_s = self._clock()
        yield
        self.waited_s += self._clock() - began_s

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """The block is not training: validation, saving."""
        began_s = self._clock()
        yield
        self.paused_s += self._clock() - began_s

    def read(self, *, step: int, tokens: int) -> dict[str, float]:
        """Figures of the interval that ends here; a new one begins."""
        elapsed_s = max(1e-9, self._clock() - self._started_s - (self.paused_s - self._paused_before_s))
        steps = max(1, step - self._step)
        rate = (tokens - self._tokens) / elapsed_s
        figures = {
            "speed/tokens_per_s": rate,
            "speed/step_ms": 1e3 * elapsed_s / steps,
            "speed/data_wait_pct": 100.0 * (self.waited_s - self._waited_before_s) / elapsed_s,
            "speed/eta_s": (self._total_steps - step) * elapsed_s / steps,
        }
        if self._flops_per_token is not None and self._peak_flops is not None:
            figures["speed/mfu_pct"] = 100.0 * rate * self._flops_per_token / self._peak_flops
        self.start(step=step, tokens=tokens)
        return figures


def read_peak_gib(device: torch.device) -> float:
    """Most memory held so far by tensors on a GPU, or by this process on a CPU, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextmanager
def observe_mixers(model: nn.Module) -> Generator[dict[str, torch.Tensor], None, None]:
    """Collects, while the block runs the model, flat fp32 CPU tensors by tag: `decay/<layer>` (per token and head,
    in 0 to 1), `step_size/<layer>` and `state_norm/<layer>` (Frobenius, per row and head).

    Sees modules named decay, step_sizes and mixer; compiled blocks run uncompiled meanwhile.
    """
    seen: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_hook(_build_hook(seen, name))
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in OBSERVED_MODULES
    ]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def _build_hook(seen: dict[str, torch.Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    path, _, kind = name.rpartition(".")

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        if kind == "decay":
            seen[f"decay/{path}"] = _flatten(output.float().exp())
        elif kind == "step_sizes":
            seen[f"step_size/{path}"] = _flatten(output)
        elif (state := _find_state(output)) is not None:
            seen[f"state_norm/{name}"] = _flatten(state.float().norm(dim=(-2, -1)))

    return record


def _find_state(output: Any) -> torch.Tensor | None:
    """state_BHVK of a recurrent mixer's new state; None for a mixer that has no such state."""
    state = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    return getattr(state, "state_BHVK", None)


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().flatten().cpu()
