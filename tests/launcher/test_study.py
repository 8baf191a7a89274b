"""A study's runs: as many as the product, told apart by name, undisturbed by what is added later."""

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.config import RunConfig, dump_config, load_config
from launcher.study import NAME, Study, StudyEntry, expand_study, spell_override, spell_settings, split_keys

KEYS = ["model.solver_steps", "train.steps", "train.schedule.warmup_steps", "data.weights.a_b", "data.weights.a-b", "a"]
TEXTS = st.text(alphabet="aZ0_-.,:/=[]{}#\"'\\ \né~", max_size=50)
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), TEXTS, st.none()
)
VALUES = st.lists(
    st.one_of(SCALARS, st.lists(SCALARS, max_size=3)),
    min_size=1,
    max_size=3,
    unique_by=lambda value: str(value).lower(),
)
GRIDS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3)
SEEDS = st.lists(st.integers(0, 5), max_size=3, unique=True)


def build_study(grid: dict[str, list[Any]], seeds: list[int], entries: int = 0) -> Study:
    listed = [StudyEntry(name=f"run_{number}") for number in range(entries)]
    return Study(name="s", base="base.yaml", grid=grid, seeds=seeds, runs=listed)


def try_to_build(grid: dict[str, list[Any]], seeds: list[int], entries: int = 0) -> Study | None:
    """None where two values read the same in a name, which a study refuses: 1 and "1"."""
    try:
        return build_study(grid, seeds, entries)
    except ValueError as error:
        assert "must stand there once" in str(error)
        return None


@settings(deadline=None, max_examples=40)
@given(GRIDS, SEEDS, st.integers(0, 3))
def test_runs_are_the_product_of_entries_values_and_seeds_each_with_a_name_of_its_own(
    grid: dict[str, list[Any]], seeds: list[int], entries: int
) -> None:
    study = try_to_build(grid, seeds, entries)
    if study is None:
        return
    plan = expand_study(study)
    assert len(plan) == math.prod(map(len, grid.values())) * max(1, len(seeds)) * max(1, entries)
    names = {run.name for run in plan}
    assert len(names) == len(plan) and all(NAME.fullmatch(name) and ".." not in name[:2] for name in names)
    assert len({tuple(run.overrides) for run in plan}) * max(1, entries) >= len(plan)


@settings(deadline=None, max_examples=40)
@given(GRIDS, SEEDS, st.data())
def test_added_values_and_seeds_change_neither_names_nor_order_of_the_runs_before(
    grid: dict[str, list[Any]], seeds: list[int], data: st.DataObject
) -> None:
    cut = {key: data.draw(st.integers(1, len(values))) for key, values in grid.items()}
    kept_seeds = seeds[: data.draw(st.integers(1, len(seeds)))] if seeds else []
    whole, part = try_to_build(grid, seeds), try_to_build({k: v[: cut[k]] for k, v in grid.items()}, kept_seeds)
    if whole is None or part is None:
        return
    before = [(run.name, run.overrides) for run in expand_study(part)]
    after = [(run.name, run.overrides) for run in expand_study(whole)]
    assert [run for run in after if run in before] == before


@settings(deadline=None, max_examples=40)
@given(SCALARS | st.lists(SCALARS, max_size=3))
def test_a_value_survives_its_way_over_the_command_line(value: Any) -> None:
    override = spell_override("grid.x", [value])
    loaded = load_config(Study, None, ["name=s", "base=b", override]).grid["x"]
    assert loaded == [value] and type(loaded[0]) is type(value)


@settings(deadline=None, max_examples=40)
@given(GRIDS, SEEDS)
def test_a_study_is_read_back_from_its_yaml_as_it_was(grid: dict[str, list[Any]], seeds: list[int]) -> None:
    study = try_to_build(grid, seeds, 1)
    if study is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.yaml"
        path.write_text(dump_config(study))
        assert load_config(Study, path) == study


def test_name_is_made_of_the_last_words_of_keys_and_as_many_as_tell_them_apart() -> None:
    assert spell_settings({"model.solver_steps": 2, "train.optim.beta1": 0.9}) == "solver_steps_2-beta1_0.9"
    twins = spell_settings({"data.weights.x": 1, "model.x": "a"})
    assert twins == "weights.x_1-model.x_a"
    assert spell_settings({"a": "x/y"}) != spell_settings({"a": "x_y"}) == "a_x_y"


def test_seeds_go_outermost_so_that_a_stopped_study_has_whole_comparisons() -> None:
    plan = expand_study(build_study({"model.solver_steps": [1, 2]}, [7, 8]))
    assert [run.name for run in plan[:2]] == ["solver_steps_1-seed_7", "solver_steps_2-seed_7"]
    assert plan[0].overrides == ["model.solver_steps=1", "seed=7"] and plan[0].group == "solver_steps_1"


def test_keys_of_the_study_are_told_from_keys_of_its_runs() -> None:
    words = ["base=x.yaml", "train.steps=2", "seeds=[1,2]", "seed=3", "grid.model.anchor=[none]", "overrides=[]"]
    assert split_keys(words) == (["base=x.yaml", "seeds=[1,2]", words[4], words[5]], ["train.steps=2", "seed=3"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"grid": {"seed": [1]}}, "seed must not be a key of grid or runs; use seeds="),
        ({"runs": [StudyEntry(set={"run_dir": "x"})]}, "run_dir must not be a key of grid or runs; use folder="),
        ({"overrides": ["run_dir=x"]}, "run_dir=x must not be set for all runs: each has its own; use folder="),
        ({"overrides": ["seed=1"], "seeds": [1]}, "seed=1 must not be set for all runs: each has its own; use seeds="),
        ({"overrides": ["a.b=1"], "grid": {"a.b": [1]}}, "a.b=1 must not be set for all runs"),
        ({"runs": [StudyEntry(set={"a": 1})], "grid": {"a": [1]}}, "a must not be a key of grid and of runs at once"),
        ({"runs": [StudyEntry(name="x"), StudyEntry(name="x")]}, "name=x must be one run's alone, and 2 have it"),
        ({"runs": [StudyEntry(name="../x")]}, "name=../x must be letters, digits"),
        ({"name": "a b"}, "name=a b must be letters, digits"),
        ({"base": ""}, "base= must name a configuration file"),
        ({"grid": {"a": []}}, "grid.a=[] must have at least one value"),
        ({"grid": {"a": [1, 2, 1]}}, "grid.a: 1 must stand there once, not 2 times"),
        ({"seeds": [3, 3]}, "seeds: 3 must stand there once, not 2 times"),
    ],
)
def test_study_that_contradicts_itself_is_refused_with_the_key(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        expand_study(Study(**{"name": "s", "base": "b", **fields}))
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["depth", "activation", "anchor", "gain", "solver_rank", "decay", "all"])
@pytest.mark.parametrize("base", ["tiny", "130m"])
def test_shipped_ablations_are_whole_configurations_at_every_size(name: str, base: str) -> None:
    root = Path(__file__).parent.parent.parent
    study = load_config(Study, root / "configs" / "ablation" / f"{name}.yaml")
    plan = expand_study(study)
    models = [load_config(RunConfig, root / f"configs/train/{base}.yaml", run.overrides).model for run in plan]
    assert len({repr(model) for model in models}) == len(plan) / len(study.seeds) >= 2
    assert len(study.seeds) >= 3
