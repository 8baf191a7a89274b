"""`prism scaling plan | fit | predict | report`: runs at equal compute, the law through them, and what it says."""

import argparse
import importlib.util
import sys
from collections import defaultdict
from pathlib import Path

from launcher.config import load_config
from launcher.help_text import describe_config
from launcher.run_folder import align
from launcher.scaling_files import (
    FIT_NAME,
    StoredPlan,
    list_words,
    read_outcomes,
    read_plan,
    read_stored_fit,
    write_plan,
)
from prism_lm.checkpoint.folder import write_json
from prism_lm.scaling.plan import PlanConfig, label_flops

EPILOG = """
  prism scaling plan configs/scaling/tiny.yaml   writes studies/scaling-tiny/study.yaml and plan.json
  prism sweep studies/scaling-tiny               trains its runs, here or as a SLURM array
  prism scaling fit studies/scaling-tiny         writes fit.json; stops, by name, at a run that must not be fitted
  prism scaling predict studies/scaling-tiny --budget 1e13
  prism scaling report studies/scaling-tiny      writes report.md and plots/
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism scaling",
        description="Scaling laws: plan runs at equal compute, fit what they came to, predict, report.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="plan|fit|predict|report")
    plan = actions.add_parser(
        "plan",
        help="write a study of budgets x sizes x families",
        epilog=f"keys:\n{describe_config(PlanConfig)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("config", metavar="PLAN.yaml", help="such as configs/scaling/tiny.yaml")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="any key below")
    plan.add_argument("--dry-run", action="store_true", help="print the runs and write nothing")
    _add_fit(actions.add_parser("fit", help="fit the runs that are there; writes fit.json"))
    predict = actions.add_parser("predict", help="compute-optimal size, tokens and loss of a budget")
    predict.add_argument("folder", type=Path, metavar="FOLDER")
    predict.add_argument("--budget", type=float, required=True, metavar="FLOPS", help="training FLOPs, such as 1e13")
    report = actions.add_parser("report", help="one Markdown page with plots, from fit.json")
    report.add_argument("folder", type=Path, metavar="FOLDER")
    return parser


def _add_fit(fit: argparse.ArgumentParser) -> None:
    fit.add_argument("folder", type=Path, metavar="FOLDER", help="of the study: plan.json and its runs")
    fit.add_argument("--exclude", action="append", metavar="NAME", help="leave out a run, or a group as prism-c1e12")
    fit.add_argument(
        "--no-minimum",
        action="append",
        metavar="GROUP",
        help="keep a group's runs for the law though they have no minimum between their sizes",
    )
    fit.add_argument("--draws", type=int, default=200, help="bootstrap draws (default %(default)s)")
    fit.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")


def main(arguments: list[str]) -> int:
    """Returns the exit code. Raises ValueError for what must not be planned, fitted or predicted, by name."""
    options = build_parser().parse_args(arguments)
    match options.action:
        case "plan":
            return _plan(options)
        case "fit":
            return _fit(options)
        case "predict":
            return _predict(options)
        case _:
            return _report(options)


def _plan(options: argparse.Namespace) -> int:
    plan = load_config(PlanConfig, options.config, options.overrides)
    if options.dry_run:
        from launcher.scaling_files import read_base
        from prism_lm.scaling.plan import plan_runs

        print(
            "\n".join(_list_points(StoredPlan(title="", rule="", points=plan_runs(plan, read_base(plan)), ladders={})))
        )
        return 0
    stored = write_plan(plan)
    print("\n".join(_list_points(stored)))
    print(f"\n{stored.rule}\n\nnext: prism sweep {plan.place}, then prism scaling fit {plan.place}")
    return 0


def _list_points(stored: StoredPlan) -> list[str]:
    header = ["run", "parameters", "tokens", "steps", "FLOPs", "learning rate"]
    rows = [
        [
            point.name + (" (held out)" if point.held_out else ""),
            f"{point.parameters:,}",
            f"{point.tokens:,}",
            f"{point.steps:,}",
            f"{point.flops:.4g}",
            f"{point.learning_rate:g}",
        ]
        for point in stored.points
    ]
    totals: dict[str, float] = defaultdict(float)
    for point in stored.points:
        totals[label_flops(point.budget_flops)[1:]] += point.flops
    sums = ", ".join(f"{label}: {flops:.3g}" for label, flops in totals.items())
    return [*align([header, *rows]), "", f"{len(rows)} runs, {sum(totals.values()):.3g} FLOPs ({sums})"]


def _fit(options: argparse.Namespace) -> int:
    _check_packages("scipy")
    if options.draws < 20:
        raise ValueError(f"--draws={options.draws} must be at least 20, for an interval of 90%; use 200")
    from prism_lm.scaling.records import take_runs
    from prism_lm.scaling.result import describe, fit_study

    plan, excluded = read_plan(options.folder), list_words(options.exclude)
    runs = take_runs(plan.points, read_outcomes(options.folder), excluded)
    print(f"fitting {len(runs)} runs, {options.draws} draws", file=sys.stderr, flush=True)
    fit = fit_study(
        runs, excluded=excluded, no_minimum=list_words(options.no_minimum), draws=options.draws, seed=options.seed
    )
    write_json(options.folder / FIT_NAME, describe(fit))
    for family in fit.families:
        law = family.law
        print(f"{family.family}: L = {law.E:.4g} + {law.A:.4g} / N^{law.alpha:.4g} + {law.B:.4g} / D^{law.beta:.4g}")
    print(f"{options.folder / FIT_NAME}; next: prism scaling report {options.folder}")
    return 0


def _predict(options: argparse.Namespace) -> int:
    if not options.budget > 0:
        raise ValueError(f"--budget={options.budget:g} must be above 0 FLOPs; for example 1e13")
    from prism_lm.scaling.optimum import Ladder
    from prism_lm.scaling.predict import compare_families, predict_budget
    from prism_lm.scaling.report import PREDICTION_HEADER, spell_bounds, spell_family, spell_prediction
    from prism_lm.scaling.result import read_fit

    plan, fit = read_plan(options.folder), read_fit(read_stored_fit(options.folder))
    ladders = {family: Ladder(rungs) for family, rungs in plan.ladders.items()}
    found = [predict_budget(family, ladders[family.family], options.budget) for family in fit.families]
    print("\n".join(align([PREDICTION_HEADER, *map(spell_prediction, found)])))
    for item in compare_families(fit, ladders, options.budget):
        print(
            f"{spell_family(item.family)} needs {item.ratio:.3f} ({spell_bounds(item.interval)}) of "
            f"{spell_family(item.baseline)}'s compute for equal loss"
        )
    return 0


def _report(options: argparse.Namespace) -> int:
    _check_packages("matplotlib")
    from prism_lm.scaling.optimum import Ladder
    from prism_lm.scaling.report import write_report
    from prism_lm.scaling.result import read_fit

    plan, fit = read_plan(options.folder), read_fit(read_stored_fit(options.folder))
    ladders = {family: Ladder(rungs) for family, rungs in plan.ladders.items()}
    print(write_report(fit, ladders, options.folder, title=plan.title, rule=plan.rule))
    return 0


def _check_packages(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"prism scaling must find {package}; pip install -e '.[scaling]'")
