"""An exported folder, loaded by transformers in a process of its own that has none of our packages, against our model.

Dims: B batch, T tokens, V vocabulary.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prism_lm.model.lm import LanguageModel

PROGRAM = Path(__file__).with_name("load_back.py")
TIMEOUT_S = 3600.0
# Of the largest logit. The sources and the operations are the same: what may differ is the order of sums, by a few
# units in the last place of fp32, and of a rounding to bf16 (2^-8) where such a sum falls on the other side of it.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True, kw_only=True)
class LoadedBack:
    """What users of the folder will get."""

    logits_BTV: Tensor
    ids: list[list[int]]
    "Of each text, as the folder's tokenizer gives them, BOS included."
    texts: list[str]
    "What the tokenizer makes of its own ids."


def load_back(folder: Path, input_ids_BT: Tensor, texts: list[str]) -> LoadedBack:
    """Run the folder's model and tokenizer in another process. Raises OSError with its last words where it fails."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as held:
        exchange = Path(held)
        request = {"input_ids": input_ids_BT.tolist(), "texts": texts}
        (exchange / "request.json").write_text(json.dumps(request), encoding="utf-8")
        _run([str(folder.absolute()), str(exchange)], exchange)
        answer: dict[str, Any] = json.loads((exchange / "answer.json").read_text(encoding="utf-8"))
        logits_BTV = load_file(exchange / "logits.safetensors")["logits"]
    return LoadedBack(logits_BTV=logits_BTV, ids=answer["ids"], texts=answer["texts"])


def _run(arguments: list[str], exchange: Path) -> None:
    """-P: the folder of the program is not searched for modules. transformers copies the folder's code to where
    HF_MODULES_CACHE says; TRITON_INTERPRET and the like are for our own kernels."""
    own = {"HF_MODULES_CACHE": str(exchange / "modules"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, "-P", str(PROGRAM), *arguments],
        cwd=exchange,
        env={**os.environ, **own, **threads},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise OSError(f"transformers must load the folder, but says: {words[0]}")


def measure_difference(model: LanguageModel, input_ids_BT: Tensor, logits_BTV: Tensor) -> float:
    """The largest difference from our model's logits, as a share of its largest logit."""
    with torch.no_grad():
        expected_BTV = model(input_ids_BT, None, None)
    return ((logits_BTV - expected_BTV).abs().max() / expected_BTV.abs().max()).item()
