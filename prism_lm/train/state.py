"""What a run is given, where it stands, and all that a resume needs besides weights."""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import nn

from prism_lm.checkpoint.load import FORMAT
from prism_lm.parallel.apply import ParallelConfig
from prism_lm.parallel.mesh import Ranks
from prism_lm.train import order_hash
from prism_lm.train.config import TrainConfig
from prism_lm.train.step import TrainBatch
from prism_lm.train.tasks import TaskScorer

Status = Literal["finished", "preempted"]


class Loader(Protocol):
    """Micro-batches of this rank, or its slices of those of its sequence group; their place in the data is a plain
    state."""

    def __iter__(self) -> Iterator[TrainBatch]:
        """Endless loaders go on where they are; one that ends begins again."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The place after the batches taken so far, in plain values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on from that place."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainRun:
    """Everything run_training needs to know."""

    run_dir: Path
    "Folder of the run on a file system all ranks see; a complete checkpoint in it is resumed."
    train: TrainConfig
    parallel: ParallelConfig
    ranks: Ranks
    seed: int
    "Seeds the model's initial values, the same on every rank, then each rank's generators."
    build_model: Callable[[], nn.Module]
    "A model in fp32 on the CPU with `blocks`, whose forward of a batch gives the loss sum."
    build_train_loader: Callable[[], Loader]
    "An endless loader; called once the process group is up."
    build_validation_loader: Callable[[], Loader] | None
    """A loader that ends, with equally many batches on every rank; called once, like the other one. Needed where
    train.eval_every_steps is not 0."""
    validation_sources: tuple[str, ...] = ()
    """Names of the validation rows' sources, as the numbers in their batches count them; with more than one, each has
    a validation loss of its own, and the model's forward takes `reduction="none"`."""
    task_scorer: TaskScorer | None = None
    "Scores the tasks of train.tasks; needed where train.tasks.every_steps is not 0."
    flops_per_token: float | None
    "Forward and backward FLOPs of one token; None leaves the MFU out."
    config_yaml: str
    "The resolved configuration, kept as config.yaml."
    environment: Mapping[str, Any]
    "Kept as environment.json."
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    "Kept in the run folder under these names when the run starts, such as tokenizer.model."
    fingerprints: Mapping[str, str] = field(default_factory=dict[str, str])
    "Names and identities (of model, data) that a resume must find unchanged."

    def list_fixed(self) -> dict[str, Any]:
        """The settings in which a resume must equal its checkpoint, under the names a user types."""
        return {
            "seed": self.seed,
            "train.precision": self.train.precision,
            "train.global_batch_rows": self.train.global_batch_rows,
            **{f"fingerprint.{name}": value for name, value in self.fingerprints.items()},
        }

    def describe_arrangement(self) -> dict[str, Any]:
        """What a resume may change, at the price of sums in another order."""
        return {
            "world_size": self.ranks.world_size,
            "parallel.sequence_degree": self.ranks.sequence_degree,
            "train.zero_stage": self.train.zero_stage,
            "train.micro_batch_rows": self.train.micro_batch_rows,
        }


@dataclass(kw_only=True)
class TrainState:
    """Where the run stands; the same on every rank."""

    step: int = 0
    "Global batches taken, skipped ones included: a step and its place in the data always belong together."
    tokens: int = 0
    "Positions in the global batches taken."
    skipped_steps: int = 0
    "Steps whose update was not applied, because something was not finite or the loss far above those before it."
    skipped_in_a_row: int = 0
    "Skipped steps since the last applied one."
    order_hash: str = ""
    "The running hash (order_hash.py) of the rows of all steps taken, skipped ones included."
    spike_window: list[float] = field(default_factory=list[float])
    "Losses in nats of the last applied steps, oldest first, at most train.spike_window_steps of them."
    validation_due: bool = False
    "This step's evaluation is still to be made: a stop came first."
    tasks_due: bool = False
    "The same of the tasks' scores."

    def advance(self, *, tokens: int, applied: bool, batch_hash: int) -> None:
        """One step on; batch_hash is the sum modulo 2^63 of the row hashes of the global batch."""
        self.step += 1
        self.tokens += tokens
        self.skipped_steps += int(not applied)
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        self.order_hash = order_hash.extend(self.order_hash, batch_hash)

    def describe(self, run: TrainRun) -> dict[str, Any]:
        """What trainer.json holds, but for the loader's place."""
        fixed, arrangement = run.list_fixed(), run.describe_arrangement()
        return {"format": FORMAT, **asdict(self), **fixed, **arrangement, "train": asdict(run.train)}

    @staticmethod
    def from_trainer(trainer: Mapping[str, Any]) -> "TrainState":
        """Checkpoints from before tasks were scored do not speak of them."""
        held = {"tasks_due": False, **trainer}
        return TrainState(**{name: type(value)(held[name]) for name, value in asdict(TrainState()).items()})


def seed_generators(seed: int) -> None:
    """Seeds the generators of Python, numpy and torch (on every device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_generators() -> dict[str, Any]:
    """This process's generators, in values that torch.load reads with weights_only."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "python": (version, list(internal), gauss_next),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_generators(state: Mapping[str, Any]) -> None:
    """Restores what capture_generators gave."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def hash_seed(seed: int, step: int, rank: int) -> int:
    """A rank's seed after a resume by another number of processes than saved, 63 bits."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
