"""A fitted study as one Markdown page with its pictures beside it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prism_lm.scaling.fit import Law, interval
from prism_lm.scaling.optimum import Ladder
from prism_lm.scaling.plan import label_flops
from prism_lm.scaling.plots import draw_all, spell_count, spell_family
from prism_lm.scaling.predict import Prediction, compare_families, predict_budget
from prism_lm.scaling.records import Refused
from prism_lm.scaling.result import FamilyFit, StudyFit, predict_held_out

REPORT_NAME = "report.md"
PLOTS_NAME = "plots"


def write_report(fit: StudyFit, ladders: Mapping[str, Ladder], folder: Path, *, title: str, rule: str) -> Path:
    """report.md and plots/ in the folder; returns the page's path. `rule` says how sizes and rates were chosen."""
    draw_all(fit, ladders, folder / PLOTS_NAME)
    sections = [
        f"# {title}",
        _introduce(fit, rule),
        "## Loss at equal compute\n\n![loss over parameters at equal compute](plots/isoflop.png)",
        _table_of_minima(fit),
        "## The law L(N, D) = E + A / N^alpha + B / D^beta\n\n![loss over compute](plots/compute.png)",
        _table_of_laws(fit),
        _describe_held_out(fit),
        "![residuals](plots/residuals.png)",
        _describe_optima(fit, ladders),
        _describe_comparison(fit, ladders),
        _table_of_runs(fit),
    ]
    path = folder / REPORT_NAME
    path.write_text("\n\n".join(filter(None, sections)) + "\n", encoding="utf-8")
    return path


def list_budgets(fit: StudyFit) -> list[float]:
    """Budgets of the study, held-out ones too, small to large."""
    return sorted({run.point.budget_flops for family in fit.families for run in family.runs + family.held_out})


def spell_prediction(item: Prediction) -> list[str]:
    """Cells of a table: family, N, D, loss with intervals, the nearest size, N by the parabolas."""
    rung = item.rung
    return [
        spell_family(item.family),
        f"{spell_count(item.best.parameters)} ({spell_interval(item.parameters)})",
        f"{spell_count(item.best.tokens)} ({spell_interval(item.tokens)})",
        f"{item.best.loss_nats:.4f} ({item.loss_nats[0]:.4f} to {item.loss_nats[1]:.4f})",
        f"{rung.heads} heads, width {rung.width}, {rung.layers} layers, {rung.parameters:,}",
        "-" if item.by_minima is None else spell_count(item.by_minima),
    ]


PREDICTION_HEADER = [
    "family",
    "N* (90%)",
    "D* (90%)",
    "loss, nats (90%)",
    "nearest size by the rule",
    "N* by parabolas",
]


def spell_interval(bounds: tuple[float, float]) -> str:
    """1.2M to 3M."""
    return f"{spell_count(bounds[0])} to {spell_count(bounds[1])}"


def build_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _introduce(fit: StudyFit, rule: str) -> str:
    runs = sum(len(family.runs) for family in fit.families)
    held = sum(len(family.held_out) for family in fit.families)
    draws = len(fit.families[0].draws)
    lines = [
        f"{runs} runs fitted, {held} held out and predicted. N counts every trainable parameter, a tied table once; "
        "FLOPs are the cost model's, forward and backward.",
        rule,
        f"Intervals are 90%, from {draws} draws of a parametric bootstrap, seed {fit.seed}.",
    ]
    if fit.excluded:
        lines.append(f"Left out by name: {', '.join(fit.excluded)}.")
    if fit.no_minimum:
        lines.append(f"Without a parabola, since it had no minimum between its sizes: {', '.join(fit.no_minimum)}.")
    return "\n".join(lines)


def _table_of_minima(fit: StudyFit) -> str:
    rows = [
        [
            spell_family(family.family),
            label_flops(item.budget_flops)[1:] + (" (held out)" if item.held_out else ""),
            f"{spell_count(math.exp(item.log_parameters))} ({spell_interval(family.minima[item.group])})",
            f"{math.exp(item.log_loss):.4f}",
        ]
        for family in fit.families
        for item in family.parabolas
    ]
    table = build_table(["family", "FLOPs", "N at the minimum (90%)", "loss there, nats"], rows)
    sizes = [
        f"{spell_family(family.family)}: N* grows as C^{family.size.exponent:.3f} "
        f"({family.size.exponents and spell_bounds(interval(family.size.exponents))}) over the fitted budgets."
        for family in fit.families
        if family.size is not None
    ]
    return "\n\n".join([table, *sizes])


def spell_bounds(bounds: tuple[float, float]) -> str:
    """0.31 to 0.36."""
    return f"{bounds[0]:.3g} to {bounds[1]:.3g}"


def _table_of_laws(fit: StudyFit) -> str:
    names = ("E", "A", "alpha", "B", "beta")
    rows = [
        [
            spell_family(family.family),
            *(f"{_number(family.law, name):.4g} ({_spell_draws(family, name)})" for name in names),
            _spell_share(family),
        ]
        for family in fit.families
    ]
    return build_table(["family", "E", "A", "alpha", "B", "beta", "N* ~ C^(beta/(alpha+beta))"], rows)


def _number(law: Law, name: str) -> float:
    return float(getattr(law, name))


def _spell_draws(family: FamilyFit, name: str) -> str:
    return spell_bounds(interval([_number(law, name) for law in family.draws]))


def _spell_share(family: FamilyFit) -> str:
    shares = [law.beta / (law.alpha + law.beta) for law in (family.law, *family.draws)]
    return f"{shares[0]:.3f} ({spell_bounds(interval(shares[1:]))})"


def _describe_held_out(fit: StudyFit) -> str:
    rows: list[list[str]] = []
    errors: list[str] = []
    for family in fit.families:
        found = predict_held_out(family, fit.seed)
        for run, loss, bounds in found:
            inside = "inside" if bounds[0] <= run.loss_nats <= bounds[1] else "outside"
            error = f"{100 * (loss / run.loss_nats - 1):+.2f}%"
            rows.append(
                [
                    run.point.name,
                    f"{run.loss_nats:.4f}",
                    f"{loss:.4f} ({bounds[0]:.4f} to {bounds[1]:.4f})",
                    error,
                    inside,
                ]
            )
        if found:
            mean = sum(abs(loss / run.loss_nats - 1) for run, loss, _ in found) / len(found)
            errors.append(
                f"{spell_family(family.family)}: mean error {100 * mean:.2f}% over {len(found)} held-out runs."
            )
    if not rows:
        return ""
    table = build_table(["held-out run", "measured, nats", "predicted (90%)", "error", "its interval"], rows)
    return "\n\n".join(["## Held-out budgets", *errors, _describe_held_out_minima(fit), table])


def _describe_held_out_minima(fit: StudyFit) -> str:
    lines: list[str] = []
    for family in fit.families:
        for item in family.parabolas:
            if item.held_out and family.size is not None:
                predicted = math.exp(family.size.level) * item.budget_flops**family.size.exponent
                lines.append(
                    f"{item.group}: N* measured {spell_count(math.exp(item.log_parameters))} "
                    f"({spell_interval(family.minima[item.group])}), by the fitted budgets' minima "
                    f"{spell_count(predicted)}."
                )
    return "\n\n".join(lines)


def _describe_optima(fit: StudyFit, ladders: Mapping[str, Ladder]) -> str:
    budgets = list_budgets(fit)
    rows: list[list[str]] = []
    for flops in [*budgets, 10 * budgets[-1]]:
        for family in fit.families:
            try:
                cells = spell_prediction(predict_budget(family, ladders[family.family], flops))
            except Refused as error:
                cells = [spell_family(family.family), str(error).partition(", and ")[2].partition(";")[0], *[""] * 4]
            rows.append([label_flops(flops)[1:], *cells])
    return "## Compute-optimal sizes\n\n" + build_table(["FLOPs", *PREDICTION_HEADER], rows)


def _describe_comparison(fit: StudyFit, ladders: Mapping[str, Ladder]) -> str:
    found = [item for flops in list_budgets(fit) for item in compare_families(fit, ladders, flops)]
    if not found:
        return ""
    rows = [
        [label_flops(item.flops)[1:], spell_family(item.baseline), f"{item.ratio:.3f} ({spell_bounds(item.interval)})"]
        for item in found
    ]
    name = spell_family(found[0].family)
    words = f"Compute that {name} needs for the loss that the baseline reaches with its best size, as a share of the "
    words += "baseline's; an interval that holds 1 decides nothing. FLOPs, not seconds."
    return f"## {name} against its baselines\n\n{words}\n\n" + build_table(["FLOPs", "baseline", "ratio (90%)"], rows)


def _table_of_runs(fit: StudyFit) -> str:
    rows = [
        [
            run.point.name + (" (held out)" if run.point.held_out else ""),
            f"{run.point.parameters:,}",
            f"{run.point.tokens:,}",
            f"{run.point.flops:.4g}",
            f"{run.point.learning_rate:g}",
            f"{run.loss_nats:.4f}",
        ]
        for family in fit.families
        for run in family.runs + family.held_out
    ]
    return "## Runs\n\n" + build_table(["run", "N", "D", "FLOPs", "learning rate", "loss, nats"], rows)
