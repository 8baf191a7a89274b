from dataclasses import replace

import pytest

from prism_lm.model.config import ModelConfig

MIXERS = "prism, gated_delta, linear_attention, ttt, attention or peer"
WRONG = [
    (dict(key_width=24), "model.key_width=24 must be a multiple of 16; use 32"),
    (dict(value_width=8), "model.value_width=8 must be a multiple of 16; use 16"),
    (dict(solver_steps=5), "model.solver_steps=5 must be 0 to 4; use 2"),
    (
        dict(solver_rank=1024),
        "model.solver_rank=1024 must be below model.model_width=1024; use 128, or 0 for full rank",
    ),
    (dict(conv_width=1), "model.conv_width=1 must be at least 2; use 4, or model.anchor=none"),
    (dict(chunk_tokens=48), "model.chunk_tokens=48 must be one of 16, 32, 64, 128; use 64"),
    (
        dict(num_layers=4, layer_pattern=["prism", "prism", "attention"]),
        "model.layer_pattern=[prism,prism,attention] must have a length that divides model.num_layers=4; "
        "use model.num_layers=3",
    ),
    (dict(mixer="mamba"), f"model.mixer=mamba must be a known choice; use {MIXERS}"),
    (dict(layer_pattern=["mlp"]), f"model.layer_pattern=mlp must be a known choice; use {MIXERS}"),
    (
        dict(mixer="ttt", key_width=64),
        "model.value_width=128 must equal model.key_width=64 for model.mixer=ttt, whose inner model adds its input to "
        "its output; use model.value_width=64",
    ),
    (dict(num_heads=0), "model.num_heads=0 must be at least 1; use a positive number"),
    (dict(norm_eps=0.0), "model.norm_eps=0.0 must be above 0; leave it out for the default"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message.split(" ")[0] for _, message in WRONG])
def test_wrong_value_names_key_rule_and_remedy(changes, message):
    with pytest.raises(ValueError) as caught:
        ModelConfig(**changes)
    assert str(caught.value) == message


def test_pattern_repeats_over_all_layers():
    config = ModelConfig(num_layers=6, layer_pattern=["prism", "prism", "attention"])
    assert config.layer_mixers() == ("prism", "prism", "attention") * 2


def test_empty_pattern_makes_every_layer_the_mixer():
    assert replace(ModelConfig(), mixer="gated_delta", num_layers=2).layer_mixers() == ("gated_delta",) * 2


def test_no_solver_still_writes_one_pair():
    assert [ModelConfig(solver_steps=steps).write_steps for steps in range(5)] == [1, 1, 2, 3, 4]
