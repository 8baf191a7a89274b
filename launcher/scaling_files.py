"""Files of a scaling study: plan.json beside study.yaml, what its runs came to, fit.json."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.config import RunConfig, load_config
from launcher.curves import read_curve
from launcher.study import Study, StudyEntry
from launcher.sweep_records import STUDY_NAME, read_study_records, run_folder
from prism_lm.checkpoint.folder import write_json, write_whole
from prism_lm.scaling.plan import Base, PlanConfig, Point, Rung, build_ladder, list_settings, plan_runs
from prism_lm.scaling.records import Outcome

PLAN_NAME, FIT_NAME = "plan.json", "fit.json"
VALIDATION_LOSS, TRAINING_LOSS = "validation/loss_nats", "train/loss_nats"


@dataclass(frozen=True, kw_only=True)
class StoredPlan:
    """What plan.json holds."""

    title: str
    rule: str
    "How sizes and learning rates were chosen, in words."
    points: list[Point]
    ladders: dict[str, list[Rung]]
    "Sizes under the rule by family."


def read_base(plan: PlanConfig) -> Base:
    """The base configuration as the plan needs it. Raises ValueError for one that is not whole."""
    run = load_config(RunConfig, plan.base, [*plan.overrides, f"run_dir={plan.place}"])
    return Base(
        model=run.model,
        learning_rate=run.train.optim.learning_rate,
        row_tokens=run.data.row_tokens,
        batch_rows=run.train.global_batch_rows,
    )


def write_plan(plan: PlanConfig) -> StoredPlan:
    """Write study.yaml, which `prism sweep FOLDER` runs, and plan.json. Raises ValueError, and writes nothing, for
    budgets that cannot be paid, and for a folder whose plan.json is another study's."""
    base = read_base(plan)
    points = plan_runs(plan, base)
    ladders = {str(family): build_ladder(plan, base, family) for family in plan.families}
    stored = StoredPlan(
        title=f"Scaling study {plan.name}", rule=_spell_rule(plan, base), points=points, ladders=ladders
    )
    folder = Path(plan.place)
    _refuse_another(folder, plan)
    folder.mkdir(parents=True, exist_ok=True)
    entries = [_build_entry(plan, base, point) for point in points if point.seed in (None, *plan.seeds[:1])]
    study = Study(
        name=plan.name, base=plan.base, overrides=plan.overrides, runs=entries, seeds=plan.seeds, folder=plan.folder
    )
    write_whole(folder / STUDY_NAME, yaml.safe_dump(asdict(study), sort_keys=False, width=110).encode())
    write_json(folder / PLAN_NAME, {"name": plan.name, **asdict(stored)})
    return stored


def read_plan(folder: Path) -> StoredPlan:
    """Raises ValueError where `prism scaling plan` wrote none there."""
    found = _read_json(folder / PLAN_NAME, "prism scaling plan")
    return StoredPlan(
        title=found["title"],
        rule=found["rule"],
        points=[Point(**point) for point in found["points"]],
        ladders={family: [Rung(**rung) for rung in rungs] for family, rungs in found["ladders"].items()},
    )


def read_stored_fit(folder: Path) -> dict[str, Any]:
    """Raises ValueError where `prism scaling fit` wrote none there."""
    return _read_json(folder / FIT_NAME, "prism scaling fit")


def read_outcomes(folder: Path) -> list[Outcome]:
    """What every run of the folder's study came to, its logged training losses included."""
    return [
        Outcome(
            name=record.name,
            status=record.status,
            tokens=record.tokens,
            loss_nats=record.losses.get(VALIDATION_LOSS),
            curve_nats=read_curve(run_folder(folder, record.name), TRAINING_LOSS)[1],
            error=record.error,
        )
        for record in read_study_records(folder)
    ]


def _build_entry(plan: PlanConfig, base: Base, point: Point) -> StudyEntry:
    name = point.name if point.seed is None else point.name.removesuffix(f"-seed_{point.seed}")
    return StudyEntry(name=name, set=list_settings(plan, base, point))


def _spell_rule(plan: PlanConfig, base: Base) -> str:
    size = plan.size
    depth = f"{size.layers_per_head:g} layers a head, at least {size.min_layers}"
    return (
        f"Width = {size.head_width} x heads, {depth if size.layers_per_head else f'{size.min_layers} layers'}; PRISM's "
        f"MLP is {size.mlp_ratio:.3g} x its width and the others' are widened to as many parameters. Learning rate = "
        f"{base.learning_rate:g} x ({base.model.model_width} / width)^{plan.rate_exponent:g}; "
        f"{base.step_tokens:,} tokens a step in rows of {base.row_tokens:,}."
    )


def _refuse_another(folder: Path, plan: PlanConfig) -> None:
    path = folder / PLAN_NAME
    name = json.loads(path.read_text(encoding="utf-8")).get("name") if path.is_file() else plan.name
    if name != plan.name or ((folder / STUDY_NAME).is_file() and not path.is_file()):
        raise ValueError(f"folder={folder} must not be another study's; give name= or folder= another value")


def _read_json(path: Path, verb: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} must be there; {verb} writes it")
    return json.loads(path.read_text(encoding="utf-8"))


def list_words(values: Sequence[str] | None) -> list[str]:
    """Names given one by one or with commas between them."""
    return [name for value in values or [] for name in value.split(",") if name]
