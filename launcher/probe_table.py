"""The tables of a probe: mean accuracy with a 95% interval over seeds, and what depth gains, paired by seed.

Pure: from the cells' results to Markdown and to what probe.json holds.
"""

import math
from dataclasses import dataclass
from typing import Any

from prism_lm.eval.probes.models import DEPTHS, MATCHED_PCT
from prism_lm.eval.probes.rows import Task

# Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL_QUANTILE = 1.960
NO_DEPTH = "prism_l0"


@dataclass(frozen=True)
class Estimate:
    """A mean and half of its 95% interval; None with one seed, which says nothing of the spread."""

    mean: float
    half_width: float | None
    values: tuple[float, ...]

    def format_pct(self, *, signed: bool = False) -> str:
        """Percent with a decimal, such as 97.3 ± 1.1."""
        sign = "+" if signed else ""
        interval = "" if self.half_width is None else f" ± {100 * self.half_width:.1f}"
        return f"{100 * self.mean:{sign}.1f}{interval}"

    @property
    def excludes_zero(self) -> bool:
        return self.half_width is not None and abs(self.mean) > self.half_width


def estimate(values: list[float]) -> Estimate:
    """Mean and Student's 95% interval of independent values, one a seed."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return Estimate(mean, None, tuple(values))
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    quantile = T_QUANTILES[count - 2] if count - 2 < len(T_QUANTILES) else NORMAL_QUANTILE
    return Estimate(mean, quantile * deviation / math.sqrt(count), tuple(values))


def collect_accuracies(results: list[dict[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """Accuracy by task, model and seed."""
    table: dict[str, dict[str, dict[int, float]]] = {}
    for result in results:
        table.setdefault(result["task"], {}).setdefault(result["model"], {})[result["seed"]] = result["accuracy"]
    return table


def compare_depths(by_model: dict[str, dict[int, float]]) -> dict[str, Estimate]:
    """Accuracy of each deeper PRISM less that of PRISM without a solver on the same rows, seed by seed."""
    base = by_model.get(NO_DEPTH, {})
    return {
        name: estimate([accuracy - base[seed] for seed, accuracy in by_model[name].items()])
        for name in DEPTHS
        if base and name != NO_DEPTH and name in by_model
    }


def describe_probe(results: list[dict[str, Any]], tasks: list[Task], absent: list[str]) -> dict[str, Any]:
    """What probe.json holds besides every cell."""
    table = collect_accuracies(results)
    return {
        "absent": absent,
        "parameters": {result["model"]: result["parameters"] for result in results},
        "tasks": {
            task.name: {
                "asks": task.asks,
                "floor": task.floor,
                "accuracy": {name: vars(estimate([*seeds.values()])) for name, seeds in table[task.name].items()},
                "gain_over_prism_l0": {name: vars(gain) for name, gain in compare_depths(table[task.name]).items()},
            }
            for task in tasks
        },
        "cells": results,
    }


def format_report(results: list[dict[str, Any]], tasks: list[Task], absent: list[str], command: str) -> str:
    """probe.md: the two tables, what each task asks, and how it was made."""
    table = collect_accuracies(results)
    recipe, first = results[0]["recipe"], table[tasks[0].name]
    seeds = sorted(next(iter(first.values())))
    parts = [
        "# Mechanistic probes",
        "Accuracy on held-out rows, percent: mean and 95% interval (Student's t) over "
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}. The floor is the best answer without reading the row.",
        _format_accuracies(table, tasks),
        *_format_gains(table, tasks),
        "\n".join(f"- {task.name}: {task.asks}" for task in tasks),
        _describe_making(results, recipe, seeds, absent),
        f"```\n{command}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _format_accuracies(table: dict[str, dict[str, dict[int, float]]], tasks: list[Task]) -> str:
    models = list(table[tasks[0].name])
    rows = [[task.name, f"{100 * task.floor:.1f}", *_mark_best(table[task.name], models)] for task in tasks]
    return _format_markdown(["task", "floor", *models], rows)


def _mark_best(by_model: dict[str, dict[int, float]], models: list[str]) -> list[str]:
    estimates = [estimate([*by_model[name].values()]) for name in models]
    best = max(item.mean for item in estimates)
    return [f"**{item.format_pct()}**" if item.mean == best else item.format_pct() for item in estimates]


def _format_gains(table: dict[str, dict[str, dict[int, float]]], tasks: list[Task]) -> list[str]:
    gains = {task.name: compare_depths(table[task.name]) for task in tasks}
    names = list(gains[tasks[0].name])
    if not names:
        return []
    rows = [
        [task, *(f"{item.format_pct(signed=True)}{' *' if item.excludes_zero else ''}" for item in by_depth.values())]
        for task, by_depth in gains.items()
    ]
    legend = (
        f"What the solver's depth gains over {NO_DEPTH} on the same rows and seeds, percent points; * where the 95% "
        "interval leaves out 0. Where no gain above 0 has a star, iteration was not found to buy expressivity."
    )
    return [legend, _format_markdown(["task", *names], rows)]


def _format_markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _describe_making(results: list[dict[str, Any]], recipe: dict[str, Any], seeds: list[int], absent: list[str]) -> str:
    counts = [result["parameters"] for result in results]
    return (
        f"Two layers of width 16, one head of 16 x 16, 128 tokens a row, vocabulary 64; {min(counts):,} to "
        f"{max(counts):,} parameters, matched within {MATCHED_PCT:g}% by the MLP. AdamW, {recipe['steps']:,} steps of "
        f"{recipe['batch_rows']} fresh rows, peak rate {recipe['learning_rate']:g}; {recipe['heldout_rows']} held-out "
        f"rows; seeds {', '.join(map(str, seeds))}. The tasks are our reading of names in arXiv 2602.10796, so its "
        f"figures are not set beside ours. Absent here: {', '.join(absent) or 'none'}."
    )
