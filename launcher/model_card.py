"""The README.md of an exported folder: what the model is, how it did, how to load it, what was proved."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from launcher.provenance import find_version, read_commit
from launcher.run_folder import read_last_records
from prism_lm.model.cost import count_parameters
from prism_lm.train.lineage import read_result

if TYPE_CHECKING:
    from launcher.config import RunConfig
    from launcher.export import Proof
    from launcher.trained_run import TrainedRun

PACKAGES = ("prism-lm", "torch", "transformers", "tokenizers", "sentencepiece")
# Where things lay on the machine of the run is of no use elsewhere.
PRIVATE_KEYS = {"data": ("path", "cache_dir")}
HEADER = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- prism
- linear-attention
---
"""
USAGE = """\
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer(["It was"], return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0], skip_special_tokens=True))
```

The folder holds all code that it needs, in plain torch. Where `prism-lm` is installed, tensors on a CUDA device go
through its Triton kernels. A text begins with BOS, which the tokenizer adds; prompts of different lengths are padded on
the left. `<s>` and `</s>` inside a text are ordinary characters. `prism import FOLDER RUN` makes a run of it again.
"""


def write_card(folder: Path, trained: "TrainedRun", run_dir: Path, proof: "Proof") -> None:
    """Write README.md."""
    parts = [
        HEADER,
        _describe_model(trained, folder, run_dir),
        USAGE.format(name=folder.name.removeprefix(".").removesuffix(".partial")),
        _describe_evaluations(run_dir, trained.step),
        _describe_proof(proof),
        _describe_config(trained.config),
    ]
    (folder / "README.md").write_text("\n".join(part for part in parts if part), encoding="utf-8")


def _describe_model(trained: "TrainedRun", folder: Path, run_dir: Path) -> str:
    model = trained.config.model
    mixers = sorted(set(model.layer_mixers()))
    dtype = str(next(trained.model.parameters()).dtype).removeprefix("torch.")
    lines = {
        "Parameters": f"{count_parameters(model):,}",
        "Layers": f"{model.num_layers} ({', '.join(mixers)}), width {model.model_width}",
        "Vocabulary": f"{trained.tokenizer.vocab_size:,} pieces, {model.vocab_size:,} rows",
        "Trained on rows of": f"{trained.config.data.row_tokens:,} tokens",
        "Trained for": f"{trained.step:,} steps, {trained.tokens:,} tokens",
        "Weights": dtype,
        **_find_losses(run_dir, trained.step),
    }
    rows = "".join(f"| {name} | {value} |\n" for name, value in lines.items())
    title = folder.name.removeprefix(".").removesuffix(".partial")
    return f"# {title}\n\nA PRISM language model (arXiv 2602.10796).\n\n| | |\n|---|---|\n{rows}"


def _find_losses(run_dir: Path, step: int) -> dict[str, str]:
    """The last losses that the run recorded, where its record ends at the checkpoint's step."""
    records, result = read_last_records(run_dir), read_result(run_dir)
    if records is None or records.lines[-1].get("step") != step:
        return {}
    found = {"Training loss": "train/loss_nats", "Validation loss": "validation/loss_nats"}
    losses = {name: records.find(tag) for name, tag in found.items()}
    status = {"Run": str(result["status"])} if result else {}
    return {name: f"{loss:.4f} nats/token" for name, loss in losses.items() if loss is not None} | status


def _describe_evaluations(run_dir: Path, step: int) -> str:
    """Bits per byte of this step's evaluations, and the tables of its tasks."""
    rows = [_describe_score(figures) for figures in _read_scores(run_dir, step)]
    header = "| split | bits per byte | nats per token | perplexity | tokens |\n|---|---|---|---|---|\n"
    scores = header + "".join(rows) if rows else ""
    folders = [run_dir / "evaluations" / f"tasks_step_{step}", *run_dir.glob(f"evaluations/tasks_step_{step}_*")]
    tables = [_read_table(table) for folder in sorted(folders) if (table := folder / "table.md").is_file()]
    held = "\n\n".join(part for part in (scores, *tables) if part)
    return f"## Evaluation\n\n{held}\n" if held else ""


def _read_table(path: Path) -> str:
    """The tables of a folder of results, and how many documents they are of where that is not all."""
    title, *lines = path.read_text(encoding="utf-8").splitlines()
    _, limited, number = title.partition("only the first ")
    table = "\n".join(line for line in lines if line.startswith("|"))
    return f"Only the first {number}:\n\n{table}" if limited else table


def _read_scores(run_dir: Path, step: int) -> list[dict[str, Any]]:
    files = sorted((run_dir / "evaluations").glob(f"*_step_{step}_*.json"))
    found: list[dict[str, Any]] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return [figures for figures in found if "bits_per_byte" in figures]


def _describe_score(figures: dict[str, Any]) -> str:
    return (
        f"| {figures['split']} | {figures['bits_per_byte']:.4f} | {figures['loss_nats']:.4f} | "
        f"{figures['perplexity']:.2f} | {figures['num_tokens']:,} |\n"
    )


def _describe_proof(proof: "Proof") -> str:
    versions = ", ".join(f"{name} {find_version(name)}" for name in PACKAGES)
    return (
        "## Checked when it was exported\n\n"
        f"- Logits of {proof.num_compared_tokens:,} tokens, loaded by transformers without prism-lm, differ from the "
        f"trainer's by at most {proof.logits_difference:.1e} of the largest.\n"
        f"- {proof.comparison.num_equal:,} of {proof.comparison.num_texts:,} texts of {proof.texts_name} have the "
        "tokens that SentencePiece gives them, and all come back as they were.\n"
        f"- Versions: {versions}; commit {read_commit()}.\n"
    )


def _describe_config(config: "RunConfig") -> str:
    held: dict[str, Any] = {name: asdict(getattr(config, name)) for name in ("model", "data", "train")}
    for section, keys in PRIVATE_KEYS.items():
        held[section] = {key: value for key, value in held[section].items() if key not in keys}
    text = yaml.safe_dump({"seed": config.seed, **held}, sort_keys=False, width=110)
    return f"## Configuration\n\n```yaml\n{text}```\n"
