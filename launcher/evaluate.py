"""`prism evaluate RUN`: bits per byte, loss and perplexity of a run's newest checkpoint on a held-out split.

Printed and kept in RUN/evaluations/, one JSON file for a split, a step and a data set; what is there is not redone.
"""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.help_text import add_kernels_option
from prism_lm.model.operators import Kernels

if TYPE_CHECKING:
    from data_pipeline.manifest import Split
    from launcher.config import RunConfig
    from launcher.trained_run import TrainedRun
    from prism_lm.eval.perplexity import Score


def main(arguments: list[str]) -> int:
    """Evaluate and print one line of figures."""
    parsed = build_parser().parse_args(arguments)
    if parsed.micro_batch_rows is not None and parsed.micro_batch_rows < 1:
        raise ValueError(f"--micro-batch-rows={parsed.micro_batch_rows} must be at least 1; for example 8")
    figures = evaluate_run(
        Path(parsed.run),
        split=parsed.split,
        data_path=parsed.data,
        micro_batch_rows=parsed.micro_batch_rows,
        kernels=parsed.kernels,
    )
    print(
        f"step {figures['step']}  {figures['split']}  {figures['bits_per_byte']:.4f} bits/byte  "
        f"{figures['loss_nats']:.4f} nats/token  perplexity {figures['perplexity']:.2f}  "
        f"({figures['num_tokens']:,} tokens, {figures['num_bytes']:,} bytes)"
    )
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run that has saved a checkpoint")
    parser.add_argument("--split", choices=["validation", "test"], default="test", help="default %(default)s")
    parser.add_argument("--data", help="other data prepared with the run's tokenizer (default: the run's data.path)")
    parser.add_argument("--micro-batch-rows", type=int, help="rows at once (default: the run's train.micro_batch_rows)")
    add_kernels_option(parser)
    return parser


def evaluate_run(
    run_dir: Path,
    *,
    split: "Split",
    data_path: str | None = None,
    micro_batch_rows: int | None = None,
    kernels: Kernels = "auto",
) -> dict[str, Any]:
    """Score the whole split once; returns the figures as they stand in the JSON file."""
    from launcher.run_data import open_evaluated_data
    from launcher.trained_run import load_trained_run

    run = load_trained_run(run_dir, kernels=kernels)
    config, manifest = open_evaluated_data(run.config, run_dir, data_path, tokenizer=run.tokenizer)
    file = run_dir / "evaluations" / f"{split}_step_{run.step}_data_{manifest.fingerprint[:12]}.json"
    if file.is_file():
        return json.loads(file.read_text(encoding="utf-8"))
    started = time.perf_counter()
    score = _score_split(run, config, split, micro_batch_rows or config.train.micro_batch_rows)
    identity = {"split": split, "step": run.step, "data": config.data.path, "data_fingerprint": manifest.fingerprint}
    write_figures(file, {**identity, **describe_score(score), "wall_s": time.perf_counter() - started})
    return json.loads(file.read_text(encoding="utf-8"))


def write_figures(file: Path, figures: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".partial")
    beside.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    beside.replace(file)


def describe_score(score: "Score") -> dict[str, float]:
    """A score's sums and means, by name."""
    return {
        "bits_per_byte": score.bits_per_byte,
        "loss_nats": score.loss_nats,
        "perplexity": score.perplexity,
        "num_tokens": score.num_tokens,
        "num_bytes": score.num_bytes,
    }


def _score_split(run: "TrainedRun", config: "RunConfig", split: "Split", micro_batch_rows: int) -> "Score":
    import torch

    from data_pipeline.tokenizer import compute_token_bytes
    from launcher.run_data import open_one_pass
    from prism_lm.eval.perplexity import score_batches

    batches = open_one_pass(config, split=split, micro_batch_rows=micro_batch_rows)
    return score_batches(run.model, batches, torch.from_numpy(compute_token_bytes(run.tokenizer)), run.device)
