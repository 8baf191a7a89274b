"""Exported folders of small models for the tests of this folder, and a transformers 5 beside the installed one."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from data_pipeline.hf_tokenizer import convert_tokenizer, find_padding, write_hf_tokenizer
from data_pipeline.synthetic import generate_text
from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from prism_lm.export.folder import SpecialTokens, write_model
from prism_lm.model.lm import LanguageModel

SITE = Path(sysconfig.get_path("purelib"))
ROW_TOKENS = 64


def train_small_tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer((generate_text(seed) for seed in range(60)), vocab_size=400), name="test")


def write_folder(folder: Path, model: LanguageModel, tokenizer: Tokenizer, *, max_shard_bytes: int = 10**9) -> Path:
    """A whole exported folder but for the card."""
    folder.mkdir()
    ids = SpecialTokens(bos=tokenizer.bos_id, eos=tokenizer.eos_id, pad=find_padding(tokenizer))
    write_model(folder, model, model.config, tokens=ids, row_tokens=ROW_TOKENS, max_shard_bytes=max_shard_bytes)
    write_hf_tokenizer(folder, tokenizer, convert_tokenizer(tokenizer), row_tokens=ROW_TOKENS)
    return folder


def install_transformers_5() -> Path:
    """A folder with the newest transformers 5 and all that it needs but torch, made once and kept beside the
    environment. Raises RuntimeError with pip's last line where it cannot be had."""
    folder = SITE / ".transformers-5"
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    requirements = ["transformers>=5,<6", f"numpy=={importlib.metadata.version('numpy')}"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-compile", "--target", str(partial)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PIP_CONSTRAINT", "PYTHONPATH")}
    done = subprocess.run([*pip, *requirements], env=environment, capture_output=True, text=True, timeout=280)
    if done.returncode != 0:
        shutil.rmtree(partial, ignore_errors=True)
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    partial.rename(folder)
    return folder


def read_gradients(model: LanguageModel, ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the mean loss of each token given those before it."""
    model.zero_grad()
    loss = model(ids_BT[:, :-1], None, ids_BT[:, 1:].contiguous()) / ids_BT[:, 1:].numel()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
