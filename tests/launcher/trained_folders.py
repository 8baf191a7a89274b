"""A run folder with a tiny model's checkpoint, as training leaves it, without training."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from data_pipeline.config import DataConfig
from data_pipeline.tokenizer import train_tokenizer
from launcher.config import RunConfig, dump_config
from prism_lm.checkpoint.folder import describe_file
from prism_lm.checkpoint.load import FORMAT
from prism_lm.model.lm import build_model
from tests.prism_lm.model.builders import FAMILIES

TASK_FOLDER = Path(__file__).parent.parent / "eval_tasks"
VOCAB = 400


@cache
def train_small_tokenizer() -> bytes:
    """A SentencePiece model of the local tasks' own words, 400 pieces."""
    return train_tokenizer((file.read_text() for file in sorted(TASK_FOLDER.glob("*.jsonl"))), vocab_size=VOCAB)


def write_trained_run(run_dir: Path, *, family: str = "prism", step: int = 12, row_tokens: int = 64) -> Path:
    """Configuration, tokenizer and one complete checkpoint, weights in fp32."""
    model_config = replace(FAMILIES[family], vocab_size=VOCAB)
    config = RunConfig(run_dir=str(run_dir), model=model_config, data=DataConfig(path="data", row_tokens=row_tokens))
    folder = run_dir / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(dump_config(config))
    (run_dir / "tokenizer.model").write_bytes(train_small_tokenizer())
    trainer = {"format": FORMAT, "step": step, "tokens": 1000 * step, "world_size": 1}
    (folder / "trainer.json").write_text(json.dumps(trainer))
    model = build_model(config.model, seed=3, dtype=torch.float32)
    save_file({name: value.detach().clone() for name, value in model.named_parameters()}, folder / "model.safetensors")
    names = ("trainer.json", "model.safetensors")
    (folder / "manifest.json").write_text(json.dumps({"files": {name: describe_file(folder / name) for name in names}}))
    return run_dir
