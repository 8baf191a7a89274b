"""A fitted study as pictures, each as PNG and SVG: loss over size at equal compute, loss over compute, residuals."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prism_lm.scaling.fit import INTERVAL, Array, Law
from prism_lm.scaling.optimum import Ladder
from prism_lm.scaling.plan import label_flops
from prism_lm.scaling.records import Run
from prism_lm.scaling.result import FamilyFit, StudyFit, split_groups

NAMES = {
    "prism": "PRISM",
    "gated_delta": "Gated DeltaNet",
    "linear_attention": "linear attention",
    "ttt": "TTT-MLP",
    "attention": "Transformer",
}
_COLOURS = {"prism": "#0b6e99", "gated_delta": "#d1622b", "attention": "#5b5b5b"}
_SPARE_COLOURS = ("#7a4ea3", "#3a8f4d", "#b03a5b")


def spell_family(family: str) -> str:
    """PRISM, Gated DeltaNet, Transformer, or the mixer's own name."""
    return NAMES.get(family, family)


def spell_count(value: float) -> str:
    """1.23M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def draw_all(fit: StudyFit, ladders: Mapping[str, Ladder], folder: Path) -> list[Path]:
    """Write every picture to the folder, and return the PNGs."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[], Any]] = {
        "isoflop": lambda: _draw_isoflops(fit),
        "compute": lambda: _draw_compute(fit, ladders),
        "residuals": lambda: _draw_residuals(fit),
    }
    pngs: list[Path] = []
    for name, draw in pictures.items():
        figure = draw()
        for ending in ("png", "svg"):
            figure.savefig(folder / f"{name}.{ending}")
        pngs.append(folder / f"{name}.png")
    return pngs


def _start_figure(columns: int, width: float) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.6), dpi=140, layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, columns, sharey=True)).tolist()
    for panel in axes:
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _draw_isoflops(fit: StudyFit) -> Any:
    figure, axes = _start_figure(len(fit.families), 5.2 * len(fit.families) + 0.6)
    budgets = sorted({run.point.budget_flops for family in fit.families for run in family.runs + family.held_out})
    colours = _shades(len(budgets))
    for panel, family in zip(axes, fit.families, strict=True):
        for group in split_groups(family.runs + family.held_out).values():
            _draw_group(panel, family, group, colours[budgets.index(group[0].point.budget_flops)])
        panel.set(xscale="log", title=spell_family(family.family), xlabel="parameters N")
        _label_log_axis(panel.xaxis)
    axes[0].set_ylabel("validation loss, nats a token")
    axes[-1].legend(frameon=False, title="FLOPs a run", fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle("Loss at equal compute; stars: each parabola's minimum; hollow, dashed: held out of the fit")
    return figure


def _draw_group(panel: Any, family: FamilyFit, group: Sequence[Run], colour: Any) -> None:
    point = group[0].point
    parabola = next((item for item in family.parabolas if item.group == point.group), None)
    sizes = [run.point.parameters for run in group]
    face, dash = ("none", "--") if point.held_out else (colour, "-")
    losses = [run.loss_nats for run in group]
    label = label_flops(point.budget_flops)[1:] + (" held out" if point.held_out else "")
    panel.plot(sizes, losses, "o", color=colour, markerfacecolor=face, markersize=5.5, label=label)
    if parabola is not None:
        line: Array = np.geomspace(min(sizes), max(sizes), 100)
        panel.plot(line, parabola.predict(line), dash, color=colour, linewidth=1.3)
        at = (np.exp(parabola.log_parameters), np.exp(parabola.log_loss))
        panel.plot(*at, "*", color=colour, markersize=17, alpha=0.45, markeredgewidth=0, zorder=1.5)


def _draw_compute(fit: StudyFit, ladders: Mapping[str, Ladder]) -> Any:
    figure, (panel,) = _start_figure(1, 7.4)
    for index, family in enumerate(fit.families):
        colour = _colour(family.family, index)
        flops = [run.point.flops for run in family.runs + family.held_out]
        line: Array = np.geomspace(min(flops) / 1.5, max(flops) * 2, 60)
        panel.plot(
            line, _best(family.law, ladders[family.family], line), color=colour, label=spell_family(family.family)
        )
        if family.draws:
            drawn = np.stack([_best(law, ladders[family.family], line) for law in family.draws])
            panel.fill_between(line, *np.quantile(drawn, INTERVAL, axis=0), color=colour, alpha=0.15, linewidth=0)
        _scatter(panel, family.runs, lambda run: run.loss_nats, colour, shift=0.985 + 0.03 * index)
        _scatter(panel, family.held_out, lambda run: run.loss_nats, colour, shift=0.985 + 0.03 * index, hollow=True)
    held = sorted({run.point.budget_flops for family in fit.families for run in family.held_out})
    for flops_held in held:
        panel.axvspan(flops_held / 1.12, flops_held * 1.12, color="0.92", zorder=0)
    panel.set(xscale="log", xlabel="training FLOPs a run", ylabel="validation loss, nats a token")
    panel.set_title("Loss over compute: the law at its best size, with 90% intervals; grey: held out", fontsize=10)
    panel.legend(frameon=False)
    return figure


def _draw_residuals(fit: StudyFit) -> Any:
    figure, axes = _start_figure(len(fit.families), 4.6 * len(fit.families) + 0.6)
    for index, (panel, family) in enumerate(zip(axes, fit.families, strict=True)):
        colour = _colour(family.family, index)

        def residual(run: Run, law: Law = family.law) -> float:
            fitted = float(law.predict(run.point.parameters, run.point.tokens))
            return 100 * (run.loss_nats / fitted - 1)

        panel.axhline(0, color="0.3", linewidth=0.8)
        _scatter(panel, family.runs, residual, colour, label="fitted")
        _scatter(panel, family.held_out, residual, colour, hollow=True, label="held out")
        panel.set(xscale="log", xlabel="training FLOPs a run", title=spell_family(family.family))
    axes[0].set_ylabel("loss above the law, %")
    axes[-1].legend(frameon=False)
    return figure


def _scatter(
    panel: Any,
    runs: Sequence[Run],
    value: Callable[[Run], float],
    colour: Any,
    *,
    shift: float = 1.0,
    hollow: bool = False,
    label: str | None = None,
) -> None:
    if runs:
        x = [run.point.flops * shift for run in runs]
        face = "none" if hollow else colour
        panel.plot(
            x,
            [value(run) for run in runs],
            "o",
            color=colour,
            markerfacecolor=face,
            markersize=5,
            alpha=0.85,
            label=label,
        )


def _best(law: Law, ladder: Ladder, flops: Array) -> Array:
    return ladder.losses(law, flops).min(axis=1)


def _label_log_axis(axis: Any) -> None:
    """A few plain numbers, such as 200K and 1M, where decades would leave none."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    def spell_tick(value: float, _: int | None) -> str:
        return spell_count(value)

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(spell_tick))
    axis.set_minor_formatter(NullFormatter())


def _shades(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](value) for value in np.linspace(0.05, 0.85, count)]


def _colour(family: str, index: int) -> str:
    return _COLOURS.get(family, _SPARE_COLOURS[index % len(_SPARE_COLOURS)])
