from dataclasses import replace

import pytest
import torch

from prism_lm.model.init import draw_initial_value, initialise
from prism_lm.model.lm import LanguageModel, build_model
from tests.prism_lm.model.builders import FAMILIES, SMALL


def _draw(name: str, *shape: int, num_layers: int = 2, seed: int = 0) -> torch.Tensor:
    return draw_initial_value(name, torch.Size(shape), num_layers=num_layers, seed=seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_model_built_off_meta_equals_model_built_in_place(family):
    direct = LanguageModel(FAMILIES[family])
    initialise(direct, seed=7)
    values = build_model(FAMILIES[family], seed=7).state_dict()
    assert values.keys() == direct.state_dict().keys()
    assert all(torch.equal(values[name], value) for name, value in direct.state_dict().items())


def test_value_depends_on_seed_and_name_alone():
    small, deep = build_model(SMALL, seed=1), build_model(replace(SMALL, num_layers=4), seed=1)
    name = "blocks.1.mixer.projection.weight"
    assert torch.equal(small.state_dict()[name], deep.state_dict()[name])
    assert not torch.equal(_draw(name, 32, 32, seed=1), _draw(name, 32, 32, seed=2))
    assert not torch.equal(_draw(name, 32, 32), _draw(name.replace("projection", "output"), 32, 32))


def test_tied_head_stays_the_embedding_after_leaving_meta():
    model = build_model(SMALL, seed=0)
    assert model.head.weight is model.embedding.weight


def test_projection_keeps_variance():
    assert abs(_draw("blocks.0.mixer.value.weight", 400, 100).std().item() * 10 - 1) < 0.02


def test_residual_writers_shrink_with_depth():
    for name in ("blocks.0.mixer.output.weight", "blocks.0.mlp.down.weight"):
        assert abs(_draw(name, 400, 100, num_layers=8).std().item() * 40 - 1) < 0.02


def test_convolution_keeps_variance():
    taps = _draw("blocks.0.mixer.anchor.weight", 4000, 4)
    assert abs(taps.square().sum(1).mean().item() - 1) < 0.03


def test_decay_starts_in_the_published_ranges():
    rates = _draw("blocks.0.mixer.decay.A_log", 500).exp()
    steps = torch.nn.functional.softplus(_draw("blocks.0.mixer.decay.dt_bias", 500))
    assert 1 <= rates.min() < 2 and 15 < rates.max() <= 16
    assert 1e-3 * 0.999 <= steps.min() < 2e-3 and 0.08 < steps.max() <= 0.1 * 1.001


def test_inner_model_begins_as_a_projection_and_a_norm():
    name = "blocks.0.mixer.inner"
    assert abs(_draw(f"{name}.second_weight", 400, 100).std().item() * 10 - 1) < 0.02
    assert (_draw(f"{name}.norm_weight", 32) == 1).all() and (_draw(f"{name}.norm_bias", 32) == 0).all()


def test_parameter_without_a_rule_is_refused():
    with pytest.raises(ValueError, match=r"^parameter blocks\.0\.bias must have a rule"):
        _draw("blocks.0.bias", 3)
