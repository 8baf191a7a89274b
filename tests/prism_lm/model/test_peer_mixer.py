import json
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from prism_lm.model.config import ModelConfig
from prism_lm.model.cost import count_parameters, flops_per_token, state_bytes
from prism_lm.model.lm import LanguageModel, build_model
from prism_lm.model.peer_mixer import PeerMixer, build_peer_layer, find_boundaries, run_apart
from prism_lm.train.optim import split_by_decay
from tests.prism_lm.model.builders import build_rows, relative_error
from tests.prism_lm.model.fake_peers import build_peer_config, fake_peers

LAYERS = ("FakeDelta", "FakeStateSpace", "FakeLinear")
STARTS = ((0, 13), (0, 14), (1, 20))


@pytest.fixture(autouse=True)
def peers() -> Iterator[None]:
    with fake_peers():
        yield


def _build(layer: str) -> LanguageModel:
    return build_model(build_peer_config(layer), seed=3, dtype=torch.float64)


def test_constructors_are_given_what_the_configuration_says():
    given = [build_peer_layer(build_peer_config(layer), layer=1).given for layer in LAYERS]
    assert given == [(32, 1.0, 16, 2, "chunk", 1, 1), (2, 16, 32, 16, 1, 1), ("chunk", 32, 1.0, 1.0)]
    model = LanguageModel(build_peer_config(peer_options={"num_householder": 3}))
    assert [block.mixer.peer.given[-2:] for block in model.blocks] == [(3, 0), (3, 1)]


@pytest.mark.parametrize("layer", LAYERS)
@torch.no_grad()
def test_documents_of_a_packed_row_are_read_as_they_are_alone(layer):
    model = _build(layer)
    ids_BT, start_BT, labels_BT = build_rows(2, 31, starts=STARTS)
    packed_BT = model(ids_BT, start_BT, labels_BT, reduction="none")
    for row, spans in enumerate([[(0, 13), (13, 14), (14, 31)], [(0, 20), (20, 31)]]):
        for first, last in spans:
            cut = (slice(row, row + 1), slice(first, last))
            alone = model(ids_BT[cut], None, labels_BT[cut], reduction="none")
            assert relative_error(packed_BT[cut], alone) < 1e-12


@pytest.mark.parametrize("layer", LAYERS)
def test_gradient_of_packed_rows_is_the_sum_of_the_documents(layer):
    model = _build(layer)
    ids_BT, start_BT, labels_BT = build_rows(1, 31, starts=STARTS[:2])
    model(ids_BT, start_BT, labels_BT).backward()
    packed = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for first, last in ((0, 13), (13, 14), (14, 31)):
        model(ids_BT[:, first:last], None, labels_BT[:, first:last]).backward()
    for name, parameter in model.named_parameters():
        assert packed[name].any(), name
        assert relative_error(packed[name], parameter.grad) < 1e-11, name


def test_boundaries_are_row_starts_document_starts_and_the_end():
    start_BT = torch.zeros(2, 5, dtype=torch.bool)
    start_BT[0, 2] = start_BT[1, 0] = True
    boundaries = find_boundaries(start_BT)
    assert boundaries.tolist() == [0, 2, 5, 10] and boundaries.dtype == torch.int64
    assert find_boundaries(start_BT) is boundaries and not start_BT[0, 0]
    start_BT[1, 4] = True
    assert find_boundaries(start_BT).tolist() == [0, 2, 5, 9, 10]


def test_documents_apart_are_read_in_few_calls_and_put_back_in_their_places():
    lengths = [1, 9, 2, 16, 1, 12, 7]
    x_BTD = torch.arange(48.0).view(2, 24, 1)
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    shapes = []

    def count_up(rows_NTD: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(rows_NTD.shape))
        return rows_NTD.cumsum(1)

    out_BTD = run_apart(count_up, x_BTD, boundaries)
    expected = torch.cat([part.cumsum(0) for part in x_BTD.flatten(0, 1).split(lengths)])
    assert torch.equal(out_BTD.flatten(0, 1), expected)
    assert sorted(shapes) == [(1, 2, 1), (1, 7, 1), (2, 1, 1), (3, 16, 1)]


def test_a_state_is_refused_by_the_mixers_name():
    mixer = PeerMixer(build_peer_config(), layer=0)
    x_BTD = torch.zeros(1, 3, 32)
    _, state = mixer(x_BTD, None, None)
    assert state == ()
    with pytest.raises(ValueError, match=r"^model\.mixer=peer must read whole rows and cannot go on from a state"):
        mixer(x_BTD, None, state)


def test_an_unknown_layer_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"^model\.peer_layer=FakeDlta must be a layer of flash.*use FakeDelta"):
        build_peer_layer(build_peer_config("FakeDlta"), layer=0)
    with pytest.raises(ValueError, match=r"use FakeDelta, FakeLinear, FakeStateSpace$"):
        build_peer_layer(build_peer_config("xyz"), layer=0)


def test_what_the_constructor_refuses_is_said_with_all_that_it_was_given():
    config = build_peer_config(peer_options={"num_householder": 0})
    with pytest.raises(ValueError) as caught:
        LanguageModel(config)
    said = str(caught.value)
    assert said.startswith("model.peer_layer=FakeDelta must take what it is given, hidden_size=32, ")
    assert "num_householder=0" in said and "(AssertionError: num_householder must be positive)" in said


def test_a_package_that_cannot_be_imported_is_said_with_its_reason(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fla.layers", None)
    with pytest.raises(ValueError, match=r"^model\.mixer=peer must be able to import fla\.layers \("):
        build_peer_layer(build_peer_config(), layer=0)


def test_initial_values_are_the_layers_own_and_depend_on_seed_and_place_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one, again, other = (build_model(build_peer_config(), seed=seed).state_dict() for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(again[name], value) for name, value in one.items())
    name = "blocks.{}.mixer.peer.value_proj.weight"
    assert not torch.equal(one[name.format(0)], other[name.format(0)])
    assert not torch.equal(one[name.format(0)], one[name.format(1)])
    deeper = build_model(build_peer_config(num_layers=4), seed=5).state_dict()
    assert torch.equal(deeper[name.format(1)], one[name.format(1)])
    assert one[name.format(0)].abs().max() <= 32**-0.5


def test_a_model_that_was_built_in_place_has_the_same_values_as_one_off_meta():
    direct, built = LanguageModel(build_peer_config()), build_model(build_peer_config(), seed=0)
    assert all(torch.equal(built.state_dict()[name], value) for name, value in direct.state_dict().items())
    assert [block.mixer.peer.scale.item() for block in built.blocks] == [0.5, 0.5]


@pytest.mark.parametrize("settings", [{}, {"layer_pattern": ["prism", "peer"], "tie_embeddings": False}], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_counted_parameters_are_the_built_models_and_flops_three_products_each(layer, settings):
    config = build_peer_config(layer, **settings)
    with torch.device("meta"):
        model = LanguageModel(config)
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    if not settings:
        counted = [p.numel() for name, p in model.named_parameters() if p.ndim >= 2 and name != "embedding.weight"]
        assert flops_per_token(config, 64) == 6 * (sum(counted) + config.vocab_size * config.model_width)
        assert state_bytes(config) == 0


def test_weights_decay_by_their_dims_unless_the_layer_spares_them():
    model = build_model(build_peer_config(num_layers=1), seed=0)
    names = {id(parameter): name.removeprefix("blocks.0.mixer.peer.") for name, parameter in model.named_parameters()}
    decaying, spared = ({names[id(parameter)] for parameter in group} for group in split_by_decay(model))
    assert {"value_proj.weight", "o_proj.weight"} <= decaying
    assert {"A_log", "o_proj.bias", "embedding.weight"} <= spared


def test_configurations_without_the_new_fields_still_describe_a_model():
    held = {name: value for name, value in vars(ModelConfig()).items() if not name.startswith("peer_")}
    assert ModelConfig(**json.loads(json.dumps(held))) == ModelConfig()


def test_a_layer_of_a_peer_knows_no_more_than_its_own_module():
    mixer = PeerMixer(build_peer_config(), layer=0)
    assert isinstance(mixer.peer, nn.Module)
    assert {name.split(".")[0] for name, _ in mixer.named_parameters()} == {"peer"}
