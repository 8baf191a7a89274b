"""DeepSpeed behind five verbs: loss, backward, step, stage, load. The only file that imports deepspeed.

Its settings are derived here from typed fields; there is no other DeepSpeed configuration.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from prism_lm.checkpoint.fragments import FragmentReader
from prism_lm.checkpoint.share import Staged
from prism_lm.parallel.apply import ParallelConfig, apply_to_blocks
from prism_lm.parallel.mesh import Ranks, choose_device
from prism_lm.train.config import TrainConfig, compute_accumulation_steps
from prism_lm.train.optim import build_adamw
from prism_lm.train.optimizer_fragments import (
    Fragment,
    check_masters,
    copy_to_host,
    count_applied_steps,
    find_fragments,
    list_shapes,
    load_fragments,
)
from prism_lm.train.stopwatch import FORWARD, GATHER, Stopwatch

# Elements reduced or gathered in one piece: large enough to fill a link, small beside the weights of a large model.
_LARGEST_BUCKET = 200_000_000
# Weights below this stay gathered in stage 3: norms and biases, which are cheaper to keep than to fetch.
_PERSISTENT_ELEMENTS = 10_000


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What became of one update."""

    applied: bool
    "False when loss or gradients were not finite: weights, moments and the optimizer's step count are as before."
    grad_norm: float
    "L2 norm of the global mean gradient before clipping; infinite or NaN when not applied."


class Engine:
    """A model, its optimizer and the communication between ranks. Every rank calls every method, in one order."""

    def __init__(self, inner: Any, adamw: torch.optim.Optimizer, config: TrainConfig, ranks: Ranks, log: Path) -> None:
        self._inner = inner
        self._adamw = adamw
        self._config = config
        self._ranks = ranks
        self._log = log
        self.device = choose_device(ranks)
        self.stopwatch = Stopwatch(self.device)
        if config.zero_stage == 3:
            _measure_gathers(inner, self.stopwatch)

    @property
    def model(self) -> nn.Module:
        return cast(nn.Module, self._inner.module)

    def compute_loss(self, batch: dict[str, torch.Tensor], *, is_last: bool) -> torch.Tensor:
        """The loss sum of a micro-batch with its graph; is_last marks the last one of the update."""
        self._inner.train()
        self._inner.set_gradient_accumulation_boundary(is_last)
        return cast(torch.Tensor, self._inner(**batch))

    def evaluate_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss sum of a micro-batch, without a graph."""
        self._inner.eval()
        with torch.no_grad():
            return cast(torch.Tensor, self._inner(**batch))

    def evaluate_token_losses(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of each token of a micro-batch (B, T), 0 where none is taken, without a graph."""
        self._inner.eval()
        with torch.no_grad():
            return cast(torch.Tensor, self._inner(**batch, reduction="none"))

    @contextmanager
    def whole_model(self) -> Generator[nn.Module, None, None]:
        """The model for reading, its whole weights on this rank's device; in stage 3 they are there for the time of the
        block alone, and what shares them must not be used after it."""
        import deepspeed

        parameters = list(self.model.parameters())
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parameters, enabled=self._config.zero_stage == 3):
            yield self.model

    def compute_logits(self, input_ids_BT: torch.Tensor, document_start_BT: torch.Tensor) -> torch.Tensor:
        """The model's logits (B, T, V), fp32 or wider, without a graph; compiled blocks run uncompiled."""
        self._inner.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return cast(torch.Tensor, self._inner(input_ids_BT, document_start_BT, None))

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of `loss`. The update uses their sum over micro-batches, averaged over ranks."""
        self._inner.backward(loss, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> StepOutcome:
        """Clips and applies the gradients and clears them; all ranks come to the same outcome."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        if self._config.zero_stage == 0:
            return self._step_unsharded()
        self._inner.step()
        return StepOutcome(applied=bool(self._inner.was_step_applied()), grad_norm=self._read_norm())

    def _read_norm(self) -> float:
        norm = self._inner.get_global_grad_norm()
        return float(norm) if norm is not None else 0.0

    def _step_unsharded(self) -> StepOutcome:
        """Stage 0 of DeepSpeed neither reports the norm nor skips, so both are done here."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([cast(torch.Tensor, parameter.grad) for parameter in parameters])
        applied = bool(torch.isfinite(norm))
        if applied:
            if self._config.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(parameters, self._config.max_grad_norm, norm)
            self._inner.step()
        else:
            self._inner.zero_grad()
        return StepOutcome(applied=applied, grad_norm=float(norm))

    def stage(self) -> Staged:
        """A copy in host memory of this rank's part of the state, and of the whole weights at rank 0."""
        fragments = self._find_fragments()
        owned = [fragment.take_share(self._ranks) for fragment in fragments] if self._is_whole else fragments
        return Staged(
            optimizer=copy_to_host(owned, self._adamw),
            pieces=[fragment.piece for fragment in owned],
            shapes=list_shapes(self.model),
            applied_steps=count_applied_steps(fragments, self._adamw),
            weights=self.gather_weights(),
        )

    def load(self, folder: Path) -> None:
        """Restores masters, moments and the count of updates from a checkpoint of any number of ranks and any stage.

        Only on a newly built engine, whose model already has the checkpoint's weights. Raises ValueError for a
        parameter that the checkpoint lacks, or whose master does not round to its weight.
        """
        fragments = self._find_fragments()
        with FragmentReader(folder) as reader:
            load_fragments(fragments, self._adamw, reader)
        check_masters(fragments, self._adamw, folder)

    @property
    def _is_whole(self) -> bool:
        return self._config.zero_stage == 0

    def _find_fragments(self) -> list[Fragment]:
        stage, rank = self._config.zero_stage, self._ranks.rank
        return find_fragments(self.model, self._inner, self._adamw, stage=stage, rank=rank)

    def gather_weights(self) -> dict[str, torch.Tensor]:
        """Whole weights and persistent buffers on the CPU at rank 0, empty elsewhere; one parameter at a time."""
        import deepspeed

        weights: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self._config.zero_stage == 3):
                if self._ranks.is_main:
                    weights[name] = parameter.detach().cpu().clone().contiguous()
        if self._ranks.is_main:
            saved_names = self.model.state_dict().keys()
            buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in saved_names}
            weights.update({name: buffer.detach().cpu().clone().contiguous() for name, buffer in buffers.items()})
        return weights

    def close(self) -> None:
        """Lets go of DeepSpeed's state; warnings go to the console again."""
        logging.captureWarnings(False)
        with quiet(self._log):
            self._inner.destroy()


def _measure_gathers(inner: Any, stopwatch: Stopwatch) -> None:
    """Times how long a forward pass stands still until the weights that it needs next are gathered."""
    coordinator = inner.optimizer.parameter_offload.get_param_coordinator()
    fetch = coordinator.fetch_sub_module

    def fetch_measured(current_submodule: nn.Module, forward: bool) -> None:
        with stopwatch.measuring(GATHER, within=FORWARD) if forward else nullcontext():
            fetch(current_submodule, forward)

    coordinator.fetch_sub_module = fetch_measured


def end_process_group() -> None:
    """Ends the default process group and what DeepSpeed remembers of it, so that this process can begin another."""
    import deepspeed

    deepspeed.comm.destroy_process_group()


def build_engine(model: nn.Module, config: TrainConfig, parallel: ParallelConfig, ranks: Ranks, log: Path) -> Engine:
    """Hands a whole model, equal on every rank, to DeepSpeed. Its messages go to the file `log`.

    The process group must be up. The model is moved to this rank's device; in stage 3 only this rank's part remains.
    """
    with quiet(log):
        deepspeed = import_deepspeed()
        send_log_to_file(log if ranks.is_main else None)
        apply_to_blocks(model, parallel)
        adamw = build_adamw(model, config.optim)
        settings = derive_settings(config, ranks, num_parameters=sum(p.numel() for p in model.parameters()))
        inner, _, _, _ = deepspeed.initialize(model=model, optimizer=cast(Any, adamw), config=settings)
    return Engine(inner, adamw, config, ranks, log)


def derive_settings(config: TrainConfig, ranks: Ranks, *, num_parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration of this run. Gradients are summed, sent and kept in fp32 whatever the weights are.

    DeepSpeed splits state over all ranks and takes each for a data rank of its own, so that it counts a row that a
    sequence group shares once for each of them.
    """
    accumulation_steps = compute_accumulation_steps(config, ranks)
    bucket = max(1_000_000, min(num_parameters, _LARGEST_BUCKET))
    clipping = config.max_grad_norm if config.zero_stage > 0 else 0.0
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch_rows,
        "gradient_accumulation_steps": accumulation_steps,
        "train_batch_size": config.micro_batch_rows * accumulation_steps * ranks.world_size,
        "gradient_clipping": clipping,
        "bf16": {"enabled": config.precision == "bf16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": torch.cuda.is_available() and config.zero_stage >= 2,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket // 4,
            "stage3_param_persistence_threshold": _PERSISTENT_ELEMENTS,
        },
        "steps_per_print": sys.maxsize,
    }


def import_deepspeed() -> Any:
    """DeepSpeed, told its accelerator. The all-reduce that it would compile at its first start on a CPU serves its
    inference alone; without it a run needs no compiler."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with _compiling_nothing(), suppress(ImportError):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    return deepspeed


@contextmanager
def _compiling_nothing() -> Generator[None, None, None]:
    """`@torch.compile` leaves a function as it is. DeepSpeed imports an optimizer that nobody here uses, whose three
    such functions import the whole compiler: a fifth of the processor time of a rank's start."""

    def leave(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    compiler = torch.compile
    setattr(torch, "compile", leave)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch, "compile", compiler)  # noqa: B010


def send_log_to_file(path: Path | None) -> None:
    """Turns DeepSpeed's logger and Python's warnings from the console to a file, a repeated warning once; to nowhere
    with None."""
    handler = logging.NullHandler() if path is None else logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(filename)s:%(lineno)d %(message)s"))
    logging.captureWarnings(True)
    for name in ("DeepSpeed", "py.warnings"):
        logger = logging.getLogger(name)
        for former in list(logger.handlers):
            logger.removeHandler(former)
        logger.addHandler(handler)
        logger.propagate = False
    seen: set[str] = set()
    logging.getLogger("py.warnings").addFilter(lambda record: _is_new(record.getMessage(), seen))


def _is_new(text: str, seen: set[str]) -> bool:
    is_new = text not in seen
    seen.add(text)
    return is_new


@contextmanager
def quiet(log: Path) -> Generator[None, None, None]:
    """Sends everything this process prints in the block, compilers it starts included, to the end of the file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, former in zip((1, 2), kept, strict=True):
            os.dup2(former, descriptor)
            os.close(former)
        os.close(target)
