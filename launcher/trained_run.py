"""A run as others use it: its model with the newest complete checkpoint's weights, and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path

import torch

from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from launcher.config import RunConfig, load_config
from prism_lm.checkpoint.load import load_weights, newest_checkpoint, read_trainer
from prism_lm.model.lm import LanguageModel, build_model
from prism_lm.model.operators import Kernels, select_operators
from prism_lm.parallel.mesh import Ranks, choose_device


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """Everything that evaluation and generation need; `step` is the checkpoint's."""

    config: RunConfig
    model: LanguageModel
    tokenizer: Tokenizer
    step: int
    tokens: int
    device: torch.device


def load_trained_run(run_dir: Path, *, kernels: Kernels = "auto") -> TrainedRun:
    """Load the newest complete checkpoint of a run. Raises ValueError where the folder holds none, and for Triton
    kernels without a CUDA device."""
    device = choose_device(Ranks())
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
    config = load_config(RunConfig, run_dir / "config.yaml")
    model = build_model(config.model, seed=config.seed, device=device, operators=operators)
    load_weights(model, checkpoint)
    trainer = read_trainer(checkpoint)
    return TrainedRun(
        config=config,
        model=model.eval(),
        tokenizer=load_tokenizer(run_dir / "tokenizer.model"),
        step=int(trainer["step"]),
        tokens=int(trainer["tokens"]),
        device=device,
    )
