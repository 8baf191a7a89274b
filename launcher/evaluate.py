"""`prism evaluate RUN`: bits per byte, loss and perplexity of a run's newest checkpoint on a held-out split.

Printed and kept in RUN/evaluations/, one JSON file for a split, a step and a data set; what is there is not redone.
Rows too long for one GPU are cut over several: `torchrun --nproc-per-node N -m launcher evaluate RUN`.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.environment import apply_environment, detect_environment
from launcher.help_text import add_kernels_option, add_sequence_degree_option
from prism_lm.model.kernels import Kernels
from prism_lm.parallel.mesh import Ranks, cut_rows

if TYPE_CHECKING:
    from data_pipeline.manifest import Split
    from launcher.config import RunConfig
    from launcher.trained_run import SavedRun
    from prism_lm.eval.perplexity import Score


def main(arguments: list[str]) -> int:
    """Evaluate and print one line of figures."""
    parsed = build_parser().parse_args(arguments)
    if parsed.micro_batch_rows is not None and parsed.micro_batch_rows < 1:
        raise ValueError(f"--micro-batch-rows={parsed.micro_batch_rows} must be at least 1; for example 8")
    environment = detect_environment(os.environ)
    apply_environment(environment)
    figures = evaluate_run(
        Path(parsed.run),
        split=parsed.split,
        data_path=parsed.data,
        micro_batch_rows=parsed.micro_batch_rows,
        kernels=parsed.kernels,
        ranks=environment.ranks,
        sequence_degree=parsed.sequence_degree,
    )
    if environment.ranks.is_main:
        print_figures(figures)
    return 0


def print_figures(figures: dict[str, Any]) -> None:
    """One line for a terminal."""
    print(
        f"step {figures['step']}  {figures['split']}  {figures['bits_per_byte']:.4f} bits/byte  "
        f"{figures['loss_nats']:.4f} nats/token  perplexity {figures['perplexity']:.2f}  "
        f"({figures['num_tokens']:,} tokens, {figures['num_bytes']:,} bytes)"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run that has saved a checkpoint")
    parser.add_argument("--split", choices=["validation", "test"], default="test", help="default %(default)s")
    parser.add_argument("--data", help="other data prepared with the run's tokenizer (default: the run's data.path)")
    parser.add_argument("--micro-batch-rows", type=int, help="rows at once (default: the run's train.micro_batch_rows)")
    add_kernels_option(parser)
    add_sequence_degree_option(parser)
    return parser


def evaluate_run(
    run_dir: Path,
    *,
    split: "Split",
    data_path: str | None = None,
    micro_batch_rows: int | None = None,
    kernels: Kernels = "auto",
    ranks: Ranks | None = None,
    sequence_degree: int | None = None,
) -> dict[str, Any]:
    """Score the whole split once; returns the figures as they stand in the JSON file.

    `ranks`: all processes of a run, each of which calls this; `sequence_degree` of them share each row, by default all.
    """
    from launcher.run_data import open_evaluated_data
    from launcher.trained_run import all_ranks, find_run
    from prism_lm.parallel.collectives import broadcast_object

    ranks = ranks or Ranks()
    run = find_run(run_dir, kernels=kernels, ranks=ranks)
    config, manifest = open_evaluated_data(run.config, run_dir, data_path, tokenizer=run.tokenizer)
    keys = {"key": "--sequence-degree", "tokens_key": "row_tokens"}
    ranks = cut_rows(
        ranks, ranks.world_size if sequence_degree is None else sequence_degree, row_tokens=manifest.row_tokens, **keys
    )
    file = run_dir / "evaluations" / f"{split}_step_{run.step}_data_{manifest.fingerprint[:12]}.json"
    identity = {"split": split, "step": run.step, "data": config.data.path, "data_fingerprint": manifest.fingerprint}
    with all_ranks(ranks):
        figures = broadcast_object(read_figures(file))
        if figures is not None:
            return figures
        started = time.perf_counter()
        score = _score_split(run, config, split, micro_batch_rows or config.train.micro_batch_rows, ranks)
    figures = {**identity, **describe_score(score), "wall_s": time.perf_counter() - started}
    if ranks.is_main:
        write_figures(file, figures)
    return figures


def read_figures(file: Path) -> dict[str, Any] | None:
    """What write_figures wrote; None where there is no file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


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


def _score_split(run: "SavedRun", config: "RunConfig", split: "Split", micro_batch_rows: int, ranks: Ranks) -> "Score":
    import torch

    from data_pipeline.tokenizer import compute_token_bytes
    from launcher.run_data import open_one_pass
    from launcher.trained_run import load_model
    from prism_lm.eval.perplexity import score_batches
    from prism_lm.parallel.apply import apply_to_operators
    from prism_lm.parallel.collectives import call_together

    batches = call_together(lambda: open_one_pass(config, split=split, micro_batch_rows=micro_batch_rows, ranks=ranks))
    operators = apply_to_operators(run.operators, ranks)
    trained = call_together(lambda: load_model(run, operators))
    return score_batches(trained.model, batches, torch.from_numpy(compute_token_bytes(run.tokenizer)), run.device)
