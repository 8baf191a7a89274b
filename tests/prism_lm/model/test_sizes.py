from dataclasses import replace

import pytest

from prism_lm.model.cost import count_parameters
from prism_lm.model.sizes import named_size, size_names

BASES = [name for name in size_names() if "-" not in name]
NOMINAL = {"130m": 130e6, "350m": 350e6, "1b": 1.3e9, "3b": 3e9, "7b": 7e9}


def test_every_size_has_both_twins():
    assert size_names() == [name for base in BASES for name in (base, f"{base}-gated_delta", f"{base}-transformer")]


@pytest.mark.parametrize("name", size_names())
def test_twin_has_the_same_parameters_within_a_percent(name):
    base = count_parameters(named_size(name.split("-")[0]))
    assert abs(count_parameters(named_size(name)) / base - 1) < 0.01


@pytest.mark.parametrize("name", BASES)
def test_solver_adds_less_than_a_tenth(name):
    config = named_size(name)
    assert config.solver_steps == 2
    assert count_parameters(config) < 1.1 * count_parameters(replace(config, solver_steps=0))


@pytest.mark.parametrize("name", NOMINAL)
def test_size_has_the_parameters_of_its_name(name):
    assert abs(count_parameters(named_size(name)) / NOMINAL[name] - 1) < 0.02


def test_unknown_size_names_the_known_ones():
    with pytest.raises(ValueError, match=r"^size=2b must be a named size; use tiny, tiny-.*7b-transformer$"):
        named_size("2b")
