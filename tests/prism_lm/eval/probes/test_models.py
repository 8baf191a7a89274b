import importlib.util

import pytest
import torch

from prism_lm.eval.probes.models import (
    CORE,
    DEPTHS,
    LARGEST,
    MATCHED_PCT,
    PEERS,
    choose_models,
    configure_model,
    is_there,
    why_absent,
)
from prism_lm.model.cost import count_parameters
from prism_lm.model.lm import LanguageModel

THERE = [name for name in CORE + PEERS if is_there(name)]


@pytest.mark.parametrize("name", THERE)
def test_built_models_have_the_parameters_of_the_largest_within_the_stated_tolerance(name: str) -> None:
    config = configure_model(name)
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in LanguageModel(config).parameters())
    assert built == count_parameters(config)
    assert abs(built / count_parameters(LARGEST) - 1) <= MATCHED_PCT / 100
    assert (config.model_width, config.key_width, config.value_width, config.num_layers) == (16, 16, 16, 2)


def test_depths_differ_in_nothing_but_the_solver_and_the_mlp() -> None:
    for name, steps in DEPTHS.items():
        changed = {key for key, value in vars(configure_model(name)).items() if value != getattr(LARGEST, key)}
        assert configure_model(name).solver_steps == steps and changed <= {"solver_steps", "mlp_width"}


def test_what_is_known_but_not_there_is_named_and_what_is_unknown_refused() -> None:
    there, absent = choose_models([])
    assert sorted(there + absent) == sorted(CORE + PEERS)
    assert {*CORE, "ttt"} <= set(there)
    assert all(why_absent(name) for name in absent) and not any(why_absent(name) for name in there)
    with pytest.raises(ValueError, match="--models=lstm must be a model; use prism_l0"):
        choose_models(["lstm"])


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="the library is there")
def test_peers_of_an_absent_library_are_absent_for_that_reason() -> None:
    assert choose_models(["gla", "prism_l1"]) == (["prism_l1"], ["gla"])
    assert why_absent("gla") == "flash-linear-attention is not installed (the `peers` extra)"
