"""`prism probe --all`: the nine mechanistic tasks, small models of equal size, a table with intervals over seeds.

Each cell (task, model, seed) is a model of two layers of width 16, trained from scratch on fresh rows and scored on
held-out ones. OUT keeps probe.md, probe.json, probe.png and a file for each cell; what is there is not redone, and
more seeds, tasks or models can be added to it.
"""

import argparse
import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from launcher.probe_cells import Cell, run_cells
from launcher.probe_plot import draw_probe
from launcher.probe_table import describe_probe, format_report
from prism_lm.eval.probes.config import ProbeConfig
from prism_lm.eval.probes.models import CORE, PEERS, choose_models, configure_model, why_absent
from prism_lm.eval.probes.rows import Task
from prism_lm.eval.probes.tasks import TASKS, choose_tasks
from prism_lm.model.cost import count_parameters

CUDA_WORKERS = 4
EXAMPLE = """\
examples:
  prism probe --tasks local_xor,mux --models prism_l0,prism_l2 --steps 100
  prism probe --all --seeds 0 1 2 --out runs/probes
  prism probe --all --seeds 0 1 2 --steps 4000 --learning-rate 0.01   ten times the steps, for a GPU
"""


def main(arguments: list[str]) -> int:
    """Run the cells that are not done yet, then print and keep the tables."""
    parsed = build_parser().parse_args(arguments)
    if not (parsed.all or parsed.tasks or parsed.models):
        raise ValueError("prism probe must be told what to run; use --all, or --tasks and --models")
    tasks = choose_tasks(read_names(parsed.tasks))
    device = choose_device(parsed.device)
    models, absent = choose_models(read_names(parsed.models), device)
    recipe = _read_recipe(parsed)
    cells = plan_cells(tasks, models, _check_seeds(parsed.seeds), recipe)
    out: Path = parsed.out
    _say(f"{len(cells)} cells on {device}, {describe_parameters(models)} parameters")
    _say(*(f"{name}: absent, not trained: {why_absent(name, device)}" for name in absent))
    results = run_cells(cells, out, device=device, workers=parsed.workers or _count_workers(device), report=_say)
    print(write_report(results, tasks, absent, out, "prism probe " + shlex.join(arguments)))
    return 0


def build_parser() -> argparse.ArgumentParser:
    recipe = ProbeConfig()
    parser = argparse.ArgumentParser(
        prog="prism probe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLE
    )
    parser.add_argument("--all", action="store_true", help="every task and every model that is there")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--models", nargs="+", default=[], metavar="MODEL", help=f"of {', '.join(CORE + PEERS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of weights and rows (default: 0)")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="of training (default %(default)s)")
    parser.add_argument("--batch-rows", type=int, default=recipe.batch_rows, help="a step (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=recipe.learning_rate, help="peak (default %(default)s)")
    parser.add_argument("--heldout-rows", type=int, default=recipe.heldout_rows, help="scored (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/probes"), help="folder (default %(default)s)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    parser.add_argument("--workers", type=int, default=0, help="processes (default: one a core; 4 on a GPU)")
    return parser


def read_names(words: list[str]) -> list[str]:
    """Names typed with commas, spaces or both, each once; a range such as prism_l0..prism_l4 is spelled out."""
    names: list[str] = []
    for word in (part for typed in words for part in typed.split(",") if part):
        first, dots, last = word.partition("..")
        names += _spell_range(first, last) if dots else [word]
    return list(dict.fromkeys(names))


def _spell_range(first: str, last: str) -> list[str]:
    known = [*CORE, *PEERS]
    if first not in known or last not in known or known.index(first) > known.index(last):
        raise ValueError(f"--models={first}..{last} must be a model and a later one; use prism_l0..prism_l4")
    return known[known.index(first) : known.index(last) + 1]


def _read_recipe(parsed: argparse.Namespace) -> ProbeConfig:
    return ProbeConfig(
        steps=parsed.steps,
        batch_rows=parsed.batch_rows,
        learning_rate=parsed.learning_rate,
        heldout_rows=parsed.heldout_rows,
    )


def _check_seeds(seeds: list[int]) -> list[int]:
    if min(seeds) < 0:
        raise ValueError(f"--seeds={min(seeds)} must be at least 0; use 0 1 2")
    return list(dict.fromkeys(seeds))


def plan_cells(tasks: list[Task], models: list[str], seeds: list[int], recipe: ProbeConfig) -> list[Cell]:
    """Every cell, a whole seed after the other, so that what was stopped can still be tabulated for fewer seeds.

    Raises ValueError for no model.
    """
    if not models:
        raise ValueError("--models must have one that is there; use prism_l0,prism_l2,gated_delta,attention")
    return [
        Cell(task=task.name, model=model, seed=seed, config=recipe)
        for seed in seeds
        for task in tasks
        for model in models
    ]


def choose_device(name: str) -> str:
    """The device to train on. Raises ValueError for a GPU that is not there."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    is_there = kind == "cpu" or (kind == "cuda" and int(index or 0) < torch.cuda.device_count())
    if not is_there:
        raise ValueError(f"--device={name} must be a device that torch sees; use cpu, or leave it out")
    return name


def _count_workers(device: str) -> int:
    return CUDA_WORKERS if device.startswith("cuda") else len(os.sched_getaffinity(0))


def describe_parameters(models: list[str]) -> str:
    """10,000 to 10,100, or one number."""
    counts = sorted({count_parameters(configure_model(name)) for name in models})
    return " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))


def write_report(results: list[dict[str, Any]], tasks: list[Task], absent: list[str], out: Path, command: str) -> str:
    """Write probe.json, probe.md and, where matplotlib is there, probe.png; returns the text of probe.md."""
    summary = describe_probe(results, tasks, absent)
    text = format_report(results, tasks, absent, command)
    (out / "probe.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (out / "probe.md").write_text(text, encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        _say("probe.png: not drawn; pip install -e '.[demo]' brings matplotlib")
    else:
        draw_probe(summary, out / "probe.png")
    return text


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)
