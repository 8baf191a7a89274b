"""Settings of a training run, apart from the model, the data and parallelism."""

from dataclasses import dataclass, field
from typing import Literal

from prism_lm.checkpoint.manager import CheckpointConfig
from prism_lm.parallel.apply import ParallelConfig
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.optim import OptimConfig
from prism_lm.train.schedule import ScheduleConfig
from prism_lm.train.tasks import TaskConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. A step is one update from one global batch."""

    steps: int = 1000
    "Length of the run in steps; the learning rate schedule spans it. Raising it extends a finished run."
    global_batch_rows: int = 8
    "Rows in one update over all processes; a multiple of micro_batch_rows x processes / parallel.sequence_degree."
    micro_batch_rows: int = 4
    "Rows one process (or parallel.sequence_degree of them) runs at once; lower it when memory is short."
    precision: Literal["fp32", "bf16"] = "fp32"
    "bf16: weights and activations in bf16, masters, moments and gradient sums in fp32; needs zero_stage 1 or more."
    zero_stage: Literal[0, 1, 2, 3] = 1
    "What DeepSpeed splits over processes: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."
    max_grad_norm: float = 1.0
    "Gradients with a larger L2 norm over all parameters are scaled down to it; 0 is off."
    log_every_steps: int = 10
    "Steps between lines of metrics."
    eval_every_steps: int = 0
    """Steps between passes over validation rows, and one after the last step; 0 means never. Where the rows are of
    several sources each has its loss beside that of all: validation/SOURCE/loss_nats, from the same pass."""
    eval_rows: int = 256
    """Validation rows of one pass over all processes, the same each time; 0 is all. Each source has its share of them,
    that of its rows in the split, to one row; a source left without a row has no loss of its own."""
    histogram_every_steps: int = 0
    "Steps between histograms of decay, step sizes and state norm; each costs one forward pass; 0 means never."
    straggler_every_steps: int = 100
    """Steps between comparisons of all ranks' times; the slowest rank and its node are named in the log where it takes
    1.1 times the median rank's step or longer; 0 is off."""
    max_skipped_steps: int = 3
    """This many steps in a row that were not applied end the run; a step with a NaN or infinite loss or gradient, or
    with a loss above the threshold of train.spike_window_steps, is never applied."""
    spike_window_steps: int = 0
    """A step whose loss lies far above those of this many applied steps before it is not applied; about 100 is usual.
    0 is off; otherwise the loss is read every step, so that the host waits for the device."""
    spike_deviations: float = 8.0
    "How far above the window's median, in robust standard deviations of at least 0.02 nats, a loss is still applied."
    hang_timeout_s: float = 1800.0
    """A run that does not come from one phase to the next (data, step, evaluation batch, checkpoint) within this many
    seconds ends, with every rank's stacks in stacks/; above the longest compilation and checkpoint."""
    rank_timeout_s: float = 60.0
    "A run in which a process gives no sign of life for this many seconds ends, naming it."
    stop_grace_s: float = 120.0
    "From the first stop signal to the end, in seconds; a run that has not saved itself by then ends as it is."
    optim: OptimConfig = field(default_factory=OptimConfig)
    "AdamW."
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    "Learning rate over the run."
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    "When to save and what to keep."
    tasks: TaskConfig = field(default_factory=TaskConfig)
    "Tasks of lm-eval, EleutherAI's harness, scored during training; pip install 'prism-lm[eval]'."

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_rows", "micro_batch_rows", "log_every_steps", "max_skipped_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)} must be at least 1; use a positive number")
        may_be_off = ("eval_every_steps", "eval_rows", "histogram_every_steps", "straggler_every_steps")
        for name in (*may_be_off, "max_grad_norm", "spike_window_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"train.{name}={getattr(self, name)} must be at least 0; use 0 to turn it off")
        for name in ("hang_timeout_s", "rank_timeout_s", "stop_grace_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"train.{name}={getattr(self, name)} must be above 0 seconds; leave it out for the default"
                )
        if not self.spike_deviations > 0:
            raise ValueError(
                f"train.spike_deviations={self.spike_deviations} must be above 0; use 8, or train.spike_window_steps=0 "
                "to turn the guard off"
            )
        if self.precision == "bf16" and self.zero_stage == 0:
            raise ValueError(
                "train.precision=bf16 must go with train.zero_stage=1, 2 or 3, not train.zero_stage=0, which keeps no "
                "fp32 master weights; use train.zero_stage=1"
            )
        if self.schedule.warmup_steps >= self.steps:
            raise ValueError(
                f"train.schedule.warmup_steps={self.schedule.warmup_steps} must be below train.steps={self.steps}; "
                f"use at most {self.steps - 1}"
            )


def compute_accumulation_steps(config: TrainConfig, ranks: Ranks) -> int:
    """Micro-batches one process runs for one update. Raises ValueError where the rows do not divide."""
    rows_at_once = config.micro_batch_rows * ranks.data_world_size
    if config.global_batch_rows % rows_at_once == 0:
        return config.global_batch_rows // rows_at_once
    below = config.global_batch_rows - config.global_batch_rows % rows_at_once
    choices = " or ".join(str(rows) for rows in (below, below + rows_at_once) if rows > 0)
    shared = f" / parallel.sequence_degree={ranks.sequence_degree}" if ranks.sequence_degree > 1 else ""
    raise ValueError(
        f"train.global_batch_rows={config.global_batch_rows} must be a multiple of train.micro_batch_rows="
        f"{config.micro_batch_rows} x {ranks.world_size} processes{shared}; use {choices}"
    )


def check_parallel(config: TrainConfig, parallel: ParallelConfig, ranks: Ranks) -> None:
    """Raises ValueError for a combination of settings that cannot run."""
    if parallel.sequence_degree != ranks.sequence_degree:
        raise ValueError(
            f"parallel.sequence_degree={parallel.sequence_degree} must equal the sequence_degree="
            f"{ranks.sequence_degree} of the ranks given; use prism_lm.parallel.mesh.cut_rows"
        )
    if parallel.compile and config.zero_stage == 3:
        raise ValueError(
            "parallel.compile=true must not go with train.zero_stage=3, whose weights exist only inside hooks that "
            "compiled code does not run; use train.zero_stage=2 or parallel.compile=false"
        )
