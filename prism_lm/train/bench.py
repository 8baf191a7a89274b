"""Timing of a whole training step, ours and a peer's alike: forward, loss, backward, clip, AdamW, without ranks.

Weights and moments are in the dtype of the weights and tokens are random: what is measured is speed, not learning.
Dims: B batch, T tokens.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prism_lm.model.config import ModelConfig
from prism_lm.model.cost import flops_per_token
from prism_lm.model.init import draw_initial_value, initialise_peers
from prism_lm.model.lm import LanguageModel
from prism_lm.model.operators import Operators
from prism_lm.parallel.apply import ParallelConfig, apply_to_blocks
from prism_lm.train.metrics import find_peak_flops, read_peak_gib
from prism_lm.train.optim import OptimConfig, build_adamw

MAX_GRAD_NORM = 1.0
UPDATE_REGION = "bench::update"
"Name under which a profile finds clipping and AdamW."


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows at once and tokens in each."""

    rows: int
    row_tokens: int

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens

    def __str__(self) -> str:
        return f"{self.rows}x{self.row_tokens}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model that can be timed."""

    name: str
    vocab_size: int
    build: Callable[[torch.device, torch.dtype], nn.Module]
    "The model with initial values, on the device in the dtype."
    compute_loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    "Mean nats of input_ids_BT and the labels_BT that follow them."
    flops_per_token: Callable[[int], float] | None
    "Training FLOPs a token in rows of that many tokens; None leaves the MFU out."


@dataclass(kw_only=True)
class Timing:
    """One candidate at one batch."""

    name: str
    batch: Batch
    parameters: int
    seconds: list[float]
    "Of each timed step."
    peak_gib: float
    first_step_s: float
    "The first step, compilation included."
    loss_nats: float
    "Of the last step: finite, or the figures mean nothing."
    mfu_pct: float | None
    met_limit: bool = False
    "Whether the limit ended it before all its steps."
    breakdown: dict[str, float] = field(default_factory=dict[str, float])
    "Milliseconds of a profiled step by kind of work; empty without a profile."
    kernels: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    "The kernels that took the most of it, and their milliseconds."

    def quantile_ms(self, quantile: float) -> float:
        return 1e3 * float(torch.tensor(self.seconds, dtype=torch.float64).quantile(quantile))

    def tokens_per_s(self, quantile: float = 0.5) -> float:
        """0.2 and 0.8 are those of the speed: of the slow and of the fast steps."""
        return self.batch.tokens / (1e-3 * self.quantile_ms(1 - quantile))

    def describe(self) -> dict[str, Any]:
        """The same in plain values."""
        quantiles = {f"p{round(100 * quantile)}": quantile for quantile in (0.2, 0.5, 0.8)}
        return {
            "name": self.name,
            "rows": self.batch.rows,
            "row_tokens": self.batch.row_tokens,
            "parameters": self.parameters,
            "tokens_per_s": {name: self.tokens_per_s(quantile) for name, quantile in quantiles.items()},
            "step_ms": {name: self.quantile_ms(quantile) for name, quantile in quantiles.items()},
            "peak_gib": self.peak_gib,
            "first_step_s": self.first_step_s,
            "loss_nats": self.loss_nats,
            "mfu_pct": self.mfu_pct,
            "met_limit": self.met_limit,
            "breakdown_ms": self.breakdown,
            "kernels_ms": self.kernels,
        }


def describe_model(name: str, config: ModelConfig, operators: Operators, parallel: ParallelConfig) -> Candidate:
    """Our model as a candidate; every row is one document, so that attention takes torch's causal kernel, no mask."""
    return Candidate(
        name=name,
        vocab_size=config.vocab_size,
        build=partial(_build_model, config, operators, parallel),
        compute_loss=_compute_loss,
        flops_per_token=partial(flops_per_token, config),
    )


def _build_model(
    config: ModelConfig, operators: Operators, parallel: ParallelConfig, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """As build_model, but matrices are drawn on the device: a billion draws on a CPU take a minute."""
    with torch.device("meta"):
        model = LanguageModel(config, operators=operators).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    of_peers = initialise_peers(model, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in of_peers:
                continue
            if parameter.ndim == 2 and parameter.shape[1] > config.conv_width:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(draw_initial_value(name, parameter.shape, num_layers=config.num_layers, seed=0))
    apply_to_blocks(model, parallel)
    return model


def _compute_loss(model: nn.Module, input_ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
    return model(input_ids_BT, None, labels_BT) / labels_BT.numel()


class Stepper:
    """A candidate's model with its optimizer, one training step a call."""

    def __init__(self, candidate: Candidate, batch: Batch, device: torch.device, dtype: torch.dtype) -> None:
        self.candidate, self.batch, self.device = candidate, batch, device
        self.model = candidate.build(device, dtype).train()
        self.parameters = list(self.model.parameters())
        self.adamw = build_adamw(self.model, OptimConfig())
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self) -> Tensor:
        """The loss, still on the device."""
        sizes = (self.batch.rows, self.batch.row_tokens + 1)
        ids = torch.randint(0, self.candidate.vocab_size, sizes, generator=self.generator, device=self.device)
        loss = self.candidate.compute_loss(self.model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        with torch.profiler.record_function(UPDATE_REGION):
            nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
            self.adamw.step()
            self.adamw.zero_grad(set_to_none=True)
        return loss.detach()


def time_candidate(
    candidate: Candidate,
    batch: Batch,
    *,
    device: torch.device,
    dtype: torch.dtype,
    warmup_steps: int,
    steps: int,
    limit_s: float = math.inf,
) -> tuple[Timing, Stepper]:
    """Time `steps` steps after `warmup_steps`, the device waited for after each; the stepper is left for a profile.

    limit_s seconds after the first step no further one begins, but one is always timed.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    stepper = Stepper(candidate, batch, device, dtype)
    first_step_s, loss = _time_step(stepper)
    began_s = time.perf_counter()
    seconds: list[float] = []
    for step in range(1, warmup_steps + steps):
        met_limit = time.perf_counter() - began_s > limit_s
        if met_limit and seconds:
            break
        elapsed_s, loss = _time_step(stepper)
        if step >= warmup_steps or met_limit:
            seconds.append(elapsed_s)
    timing = Timing(
        name=candidate.name,
        batch=batch,
        parameters=sum(parameter.numel() for parameter in stepper.parameters),
        seconds=seconds,
        peak_gib=read_peak_gib(device),
        first_step_s=first_step_s,
        loss_nats=loss,
        mfu_pct=None,
        met_limit=len(seconds) < steps,
    )
    timing.mfu_pct = _compute_mfu(candidate, timing, device, dtype)
    return timing, stepper


def _time_step(stepper: Stepper) -> tuple[float, float]:
    """Seconds and the loss; reading the loss waits for all but the update, so the device is waited for too."""
    began_s = time.perf_counter()
    loss = stepper()
    if stepper.device.type == "cuda":
        torch.cuda.synchronize(stepper.device)
    return time.perf_counter() - began_s, float(loss)


def _compute_mfu(candidate: Candidate, timing: Timing, device: torch.device, dtype: torch.dtype) -> float | None:
    peak_flops = find_peak_flops(device, "bf16" if dtype == torch.bfloat16 else "fp32")
    if candidate.flops_per_token is None or peak_flops is None:
        return None
    return 100 * candidate.flops_per_token(timing.batch.row_tokens) * timing.tokens_per_s() / peak_flops
