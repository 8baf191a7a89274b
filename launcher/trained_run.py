"""A run as others use it: its newest complete checkpoint, its tokenizer, and the model on one process or on several."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from launcher.config import RunConfig, load_config
from launcher.help_text import Precision
from prism_lm.checkpoint.load import load_weights, newest_checkpoint, read_trainer
from prism_lm.model.kernels import Kernels, select_operators
from prism_lm.model.lm import LanguageModel, build_model
from prism_lm.model.operators import Operators
from prism_lm.parallel.mesh import Ranks, check_devices, choose_device, process_group


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What a run folder holds, apart from the weights; `step` is the checkpoint's."""

    config: RunConfig
    checkpoint: Path
    tokenizer: Tokenizer
    step: int
    tokens: int
    device: torch.device
    operators: Operators


@dataclass(frozen=True, kw_only=True)
class TrainedRun(SavedRun):
    """Everything that evaluation and generation need."""

    model: LanguageModel


def find_run(run_dir: Path, *, kernels: Kernels = "auto", ranks: Ranks | None = None) -> SavedRun:
    """Read all but the weights of a run's newest complete checkpoint. Needs no process group.

    Raises ValueError where the folder holds none, for Triton kernels without a CUDA device, and for more ranks than
    devices.
    """
    ranks = ranks or Ranks()
    check_devices(ranks)
    device = choose_device(ranks)
    operators = select_operators(device.type, kernels, key="--kernels")
    if not (run_dir / "config.yaml").is_file():
        raise ValueError(
            f"RUN={run_dir} must be the folder of a run; `prism train` makes one and writes config.yaml there"
        )
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        raise ValueError(
            f"RUN={run_dir} must hold a complete checkpoint; train to the first train.checkpoint.save_every_steps"
        )
    trainer = read_trainer(checkpoint)
    return SavedRun(
        config=load_config(RunConfig, run_dir / "config.yaml"),
        checkpoint=checkpoint,
        tokenizer=load_tokenizer(run_dir / "tokenizer.model"),
        step=int(trainer["step"]),
        tokens=int(trainer["tokens"]),
        device=device,
        operators=operators,
    )


def load_trained_run(run_dir: Path, *, kernels: Kernels = "auto") -> TrainedRun:
    """Load a run on one process, in fp32. Raises ValueError as find_run does."""
    return load_model(find_run(run_dir, kernels=kernels))


def choose_dtype(run: SavedRun, precision: Precision) -> torch.dtype:
    """What `auto` means for a run: bf16 on CUDA where it was trained in bf16, else fp32."""
    if precision == "auto":
        precision = "bf16" if run.device.type == "cuda" and run.config.train.precision == "bf16" else "fp32"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]


def load_model(run: SavedRun, operators: Operators | None = None, *, dtype: torch.dtype = torch.float32) -> TrainedRun:
    """Add the model, with the checkpoint's weights in `dtype`, on the run's operators or on others."""
    given = operators or run.operators
    model = build_model(run.config.model, seed=run.config.seed, device=run.device, dtype=dtype, operators=given)
    load_weights(model, run.checkpoint)
    return TrainedRun(**vars(run), model=model.eval())


def share_weights(model: LanguageModel, operators: Operators) -> LanguageModel:
    """The same model on other operators, for inference; its weights are `model`'s own."""
    with torch.device("meta"):
        twin = LanguageModel(model.config, operators=operators)
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin.eval()


@contextmanager
def all_ranks(ranks: Ranks) -> Generator[None, None, None]:
    """The process group of the run for the time of the block; nothing where one process is alone."""
    if ranks.world_size == 1:
        yield
        return
    with process_group(ranks):
        yield
