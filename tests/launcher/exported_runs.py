"""Run folders with random weights and no data, made as `prism import` makes them, for tests of export and import."""

from dataclasses import replace
from pathlib import Path

import torch

from data_pipeline.synthetic import generate_text
from data_pipeline.tokenizer import train_tokenizer
from launcher.config import RunConfig
from launcher.imported_run import write_imported_run
from prism_lm.model.config import ModelConfig
from prism_lm.model.lm import build_model

MODEL = ModelConfig(
    vocab_size=400,
    model_width=32,
    num_layers=2,
    num_heads=2,
    key_width=16,
    value_width=16,
    mlp_width=48,
    solver_rank=8,
    chunk_tokens=16,
    layer_pattern=["prism", "attention"],
    tie_embeddings=False,
)


def draw_weights(model: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Those of seed 5, which no program draws by default."""
    return {name: weight.detach() for name, weight in build_model(model, seed=5, dtype=dtype).named_parameters()}


def train_small_tokenizer() -> bytes:
    return train_tokenizer((generate_text(seed) for seed in range(60)), vocab_size=400)


def build_config(run_dir: Path, model: ModelConfig = MODEL, *, precision: str = "fp32") -> RunConfig:
    base = RunConfig(run_dir=str(run_dir), model=model)
    data, train = replace(base.data, row_tokens=64), replace(base.train, precision=precision)
    return replace(base, data=data, train=train)


def write_run(run_dir: Path, model: ModelConfig = MODEL, *, precision: str = "fp32") -> Path:
    """The folder of a run at step 0."""
    config = build_config(run_dir, model, precision=precision)
    write_imported_run(run_dir, config, draw_weights(model), train_small_tokenizer(), origin={"source": "test"})
    return run_dir
