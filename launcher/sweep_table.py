"""`prism sweep table FOLDER [--by KEY ...]`: the final validation loss of a study, mean and interval over its seeds.

Rows are the study's settings, or with --by the values of those keys, over all else that differs. ± is half of the 95%
interval of the mean by Student's t-distribution, which takes seeds as independent and their losses as roughly normal;
one seed has none. The difference is from the first row, seed by seed where both have it, with its own t-interval. A run
that did not finish is not in a mean, and is named below. Writes table.md, table.csv and table.json into the folder.
"""

import csv
import difflib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.sweep_folder import flatten_config
from launcher.sweep_interval import Interval, compute_interval
from launcher.sweep_records import VALIDATION_LOSS, Record, read_study, read_study_records
from prism_lm.checkpoint.folder import write_json, write_whole
from prism_lm.model.cost import count_parameters

LEVEL = 0.95
_OWN = ("run_dir", "seed")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A setting of the study over its seeds."""

    name: str
    "The runs' name without the seed; empty where --by puts several in a row."
    values: dict[str, Any]
    "Of the keys that make the rows."
    runs: list[str]
    "Those in the mean."
    count_planned: int
    parameters: int | None
    "None where the runs differ in it."
    loss: Interval | None
    "Final validation loss, nats a token; None where no run finished."
    difference: Interval | None
    "From the first row, over the seeds that both have."


@dataclass(frozen=True, kw_only=True)
class Table:
    """A study's losses, and the runs that are not among them."""

    study: str
    keys: list[str]
    rows: list[Row]
    left_out: list[Record]


def tabulate(folder: Path, keys: Sequence[str] = ()) -> Table | None:
    """The table of a study's folder; None while no run has a final validation loss. Raises ValueError for an unknown
    key."""
    records = read_study_records(folder)
    _check_keys(keys, records)
    if not any(_is_counted(record) for record in records):
        return None
    groups: dict[str, list[Record]] = {}
    for record in records:
        values = flatten_config(record.config)
        label = json.dumps([values[key] for key in keys]) if keys else record.group
        groups.setdefault(label, []).append(record)
    shown = list(keys) or find_varied(records)
    first = next(iter(groups.values()))
    rows = [_build_row(group, first, shown, is_named=not keys) for group in groups.values()]
    left_out = [record for record in records if not _is_counted(record)]
    return Table(study=read_study(folder).name, keys=shown, rows=rows, left_out=left_out)


def find_varied(records: Sequence[Record]) -> list[str]:
    """The keys whose values differ between runs, their seeds and folders apart, in the configuration's order."""
    configs = [flatten_config(record.config) for record in records]
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if key not in _OWN and len({json.dumps(one.get(key)) for one in configs}) > 1]


def write_table(folder: Path, table: Table) -> str:
    """Writes the three files and returns the Markdown."""
    text = spell_markdown(table)
    write_whole(folder / "table.md", text.encode())
    write_whole(folder / "table.csv", spell_csv(table).encode())
    left_out = [{"name": one.name, "status": one.status, "error": one.error} for one in table.left_out]
    said = {"study": table.study, "loss": VALIDATION_LOSS, "interval": f"Student t, {LEVEL:.0%} of the mean over seeds"}
    write_json(folder / "table.json", said | {"rows": [asdict(row) for row in table.rows], "left_out": left_out})
    return text


def spell_markdown(table: Table) -> str:
    """The table, what its figures are, and the runs that are not in it."""
    has_names = any(row.name for row in table.rows)
    header = [*(["run"] if has_names else []), *table.keys, "parameters", "seeds", "validation nats", "difference"]
    lines = [[*([row.name] if has_names else []), *_spell_row(table, row)] for row in table.rows]
    body = [f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines]]
    notes = [
        f"Final validation loss in nats a token, mean over seeds ± half of its {LEVEL:.0%} interval (Student's t); the "
        "difference is from the first row, over the seeds that both have."
    ]
    if table.left_out:
        notes += ["", "Not in the table:", "", *map(_spell_left_out, table.left_out)]
    return "\n".join([f"## {table.study}", "", *body, "", *notes, ""])


def spell_csv(table: Table) -> str:
    """One line a row, figures in full."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    figures = ["loss_nats", "half_width_nats", "difference_nats", "difference_half_width_nats"]
    writer.writerow(["run", *table.keys, "parameters", "seeds", "planned", *figures])
    for row in table.rows:
        numbers = [value for one in (row.loss, row.difference) for value in _list_figures(one)]
        values = [row.values[key] for key in table.keys]
        writer.writerow([row.name, *values, row.parameters, len(row.runs), row.count_planned, *numbers])
    return file.getvalue()


def _build_row(group: Sequence[Record], first: Sequence[Record], keys: Sequence[str], *, is_named: bool) -> Row:
    values = flatten_config(group[0].config)
    sizes = {count_parameters(record.config.model) for record in group}
    counted = [record for record in group if _is_counted(record)]
    losses = [record.losses[VALIDATION_LOSS] for record in counted]
    return Row(
        name=group[0].group if is_named else "",
        values={key: values.get(key) for key in keys},
        runs=[record.name for record in counted],
        count_planned=len(group),
        parameters=sizes.pop() if len(sizes) == 1 else None,
        loss=compute_interval(losses, level=LEVEL) if losses else None,
        difference=None if group is first else _compare(group, first),
    )


def _compare(group: Sequence[Record], first: Sequence[Record]) -> Interval | None:
    """None where no seed is shared, or where a group has several runs of one seed, which have no partner of their
    own."""
    ours, theirs = _by_seed(group), _by_seed(first)
    if ours is None or theirs is None:
        return None
    differences = [loss - theirs[seed] for seed, loss in ours.items() if seed in theirs]
    return compute_interval(differences, level=LEVEL) if differences else None


def _by_seed(group: Sequence[Record]) -> dict[int, float] | None:
    losses = {record.seed: record.losses[VALIDATION_LOSS] for record in group if _is_counted(record)}
    return losses if len({record.seed for record in group}) == len(group) else None


def _is_counted(record: Record) -> bool:
    return record.status == "finished" and VALIDATION_LOSS in record.losses


def _check_keys(keys: Sequence[str], records: Sequence[Record]) -> None:
    known = flatten_config(records[0].config)
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1) or find_varied(records)
            raise ValueError(f"--by={key} must be a key of the runs; use {' or '.join(close) or 'model.solver_steps'}")


def _spell_row(table: Table, row: Row) -> list[str]:
    seeds = str(len(row.runs)) + (f" of {row.count_planned}" if len(row.runs) < row.count_planned else "")
    size = "-" if row.parameters is None else f"{row.parameters:,}"
    values = [_spell_value(row.values[key]) for key in table.keys]
    return [*values, size, seeds, _spell_interval(row.loss), _spell_interval(row.difference, sign="+")]


def _spell_value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|")


def _spell_interval(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return "-"
    half = "" if interval.half_width is None else f" ± {interval.half_width:.4f}"
    return f"{interval.mean:{sign}.4f}{half}"


def _list_figures(interval: Interval | None) -> list[float | None]:
    return [None, None] if interval is None else [interval.mean, interval.half_width]


def _spell_left_out(record: Record) -> str:
    why = record.error.splitlines()[0] if record.error else f"step {record.step:,} of {record.config.train.steps:,}"
    lacks = record.status == "finished" and "no validation loss; set train.eval_every_steps"
    return f"- {record.name}: {record.status}: {lacks or why}"
