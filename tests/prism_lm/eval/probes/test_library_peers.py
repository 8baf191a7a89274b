"""The compared models that are another library's layers; small ones of torch alone stand in for them."""

import pytest
import torch

from prism_lm.eval.probes.models import (
    LARGEST,
    LIBRARY_PEERS,
    MATCHED_PCT,
    PEER_LAYERS,
    choose_models,
    configure_model,
    why_absent,
)
from prism_lm.model.cost import count_parameters
from prism_lm.model.lm import LanguageModel
from tests.prism_lm.model.fake_peers import FakeDelta, FakeLinear, FakeStateSpace, fake_peers

STAND_INS = {
    "Mamba2": FakeStateSpace,
    "GatedLinearAttention": FakeLinear,
    "DeltaNet": FakeLinear,
    "GatedDeltaProduct": FakeDelta,
}


@pytest.mark.parametrize("name", PEER_LAYERS)
def test_library_peers_have_the_parameters_of_the_largest_within_the_stated_tolerance(name):
    with fake_peers(STAND_INS):
        config = configure_model(name)
        with torch.device("meta"):
            built = sum(parameter.numel() for parameter in LanguageModel(config).parameters())
        assert built == count_parameters(config)
    assert (config.mixer, config.peer_layer, config.num_layers, config.model_width) == (
        "peer",
        PEER_LAYERS[name][0],
        2,
        16,
    )
    assert abs(built / count_parameters(LARGEST) - 1) <= MATCHED_PCT / 100


def test_what_the_library_has_is_there_with_it_and_what_it_has_not_is_said():
    with fake_peers(STAND_INS):
        there, absent = choose_models(LIBRARY_PEERS, "cuda:1")
        assert (there, absent) == (list(PEER_LAYERS), ["titans"])
        assert choose_models(LIBRARY_PEERS, "cpu") == ([], LIBRARY_PEERS)
        assert why_absent("gla", "cpu") == "flash-linear-attention's kernels need a CUDA device"
    assert why_absent("titans") == "flash-linear-attention has no such layer"


def test_delta_product_writes_twice_a_token_without_a_forget_gate():
    assert PEER_LAYERS["delta_product"] == ("GatedDeltaProduct", {"num_householder": 2, "use_forget_gate": False})
