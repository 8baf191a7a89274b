"""The plot of a probe: a panel a task, a bar a model, its 95% interval over seeds, every seed and the floor."""

from pathlib import Path
from typing import Any

PANELS_A_LINE = 3


def draw_probe(summary: dict[str, Any], png: Path) -> None:
    """Draw what probe.json holds. Needs matplotlib."""
    from matplotlib.figure import Figure

    tasks: dict[str, Any] = summary["tasks"]
    lines = -(-len(tasks) // PANELS_A_LINE)
    columns = min(PANELS_A_LINE, len(tasks))
    figure = Figure(figsize=(4.2 * columns, 3.1 * lines), dpi=130, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (name, task) in zip(panels, tasks.items(), strict=False):
        _draw_task(axes, name, task)
    for axes in panels[len(tasks) :]:
        axes.remove()
    figure.supylabel("accuracy on held-out rows, % (dots: seeds; dashed: floor)")
    figure.savefig(png)


def _draw_task(axes: Any, name: str, task: dict[str, Any]) -> None:
    for index, item in enumerate(task["accuracy"].values()):
        half_width = item["half_width"]
        axes.bar(index, 100 * item["mean"], color=f"C{index % 10}", alpha=0.6)
        if half_width is not None:
            low, high = (100 * min(half_width, room) for room in (item["mean"], 1 - item["mean"]))
            axes.errorbar(index, 100 * item["mean"], yerr=[[low], [high]], color="0.2", capsize=3, linewidth=1)
        axes.plot([index] * len(item["values"]), [100 * value for value in item["values"]], ".", color="0.2", ms=4)
    axes.axhline(100 * task["floor"], color="0.4", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(task["accuracy"])), list(task["accuracy"]), rotation=40, ha="right", fontsize=7)
    axes.set(title=name.replace("_", " "), ylim=(0, 104))
    axes.grid(axis="y", alpha=0.3)
