import subprocess
import sys

import pytest

from prism_lm.model.config import ModelConfig
from prism_lm.model.peer_rules import (
    PEER_FIELDS,
    check_peer_installed,
    describe_model,
    fill_arguments,
    refuse_peer,
)
from prism_lm.parallel.apply import check_mixers
from tests.prism_lm.model.fake_peers import build_peer_config, fake_peers

DELTA = ("hidden_size", "expand_v", "head_dim", "num_heads", "mode", "num_householder", "layer_idx")


def test_heads_are_filled_by_head_dim_and_ratio_where_the_layer_counts_so():
    config = build_peer_config(value_width=32)
    known = {"hidden_size": 32, "num_heads": 2, "head_dim": 16, "expand_v": 2.0, "mode": "chunk", "layer_idx": 5}
    assert fill_arguments(config, DELTA, layer=5) == known


def test_expansions_are_of_the_model_width_where_the_layer_has_no_head_dim():
    config = build_peer_config(key_width=16, value_width=48)
    names = ("mode", "hidden_size", "expand_k", "expand_v", "num_heads")
    filled = {"hidden_size": 32, "num_heads": 2, "mode": "chunk", "expand_k": 1.0, "expand_v": 3.0}
    assert fill_arguments(config, names, layer=0) == filled


def test_a_state_space_models_head_is_our_values_and_its_state_our_keys():
    config = build_peer_config(key_width=64, value_width=32)
    filled = fill_arguments(config, ("num_heads", "head_dim", "state_size", "expand"), layer=0)
    assert filled == {"num_heads": 2, "head_dim": 32, "state_size": 64, "expand": 2}
    assert isinstance(filled["expand"], int)


def test_options_go_before_what_is_filled():
    config = build_peer_config(peer_options={"head_dim": 48, "num_householder": 3})
    filled = fill_arguments(config, DELTA, layer=0)
    assert (filled["head_dim"], filled["num_householder"], filled["num_heads"]) == (48, 3, 2)


def test_an_option_that_the_layer_has_not_is_named_with_the_nearest():
    config = build_peer_config(peer_options={"num_housholder": 2})
    with pytest.raises(
        ValueError,
        match=r"^model\.peer_options\.num_housholder=2 must be an argument of FakeDelta; use num_householder",
    ):
        fill_arguments(config, DELTA, layer=0)
    with pytest.raises(ValueError, match=r"hidden_size=8 must be left out; model\.model_width is that"):
        fill_arguments(build_peer_config(peer_options={"hidden_size": 8}), DELTA, layer=0)


def test_an_absent_package_is_one_line_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_peer_installed(ModelConfig())
    with pytest.raises(ValueError) as caught:
        check_peer_installed(build_peer_config())
    said = "model.mixer=peer must have flash-linear-attention; pip install -e '.[peers]'"
    assert str(caught.value) == said


def test_a_package_that_is_there_passes_without_being_imported():
    with fake_peers():
        check_peer_installed(build_peer_config())


def test_what_needs_a_state_or_rows_that_are_cut_is_refused_by_name():
    refuse_peer(ModelConfig(), "prism generate runs/a", "use prism evaluate")
    hybrid = build_peer_config(mixer="prism", layer_pattern=["prism", "peer"])
    with pytest.raises(ValueError, match=r"^prism generate runs/a must not go with model\.mixer=peer.*use prism eval"):
        refuse_peer(hybrid, "prism generate runs/a", "use prism evaluate")
    with pytest.raises(ValueError, match=r"^parallel\.sequence_degree=2 must be 1 for model\.mixer=peer"):
        check_mixers(hybrid, 2)


def test_a_model_without_a_peer_is_described_as_before_there_were_any():
    assert not describe_model(ModelConfig()).keys() & set(PEER_FIELDS)
    config = build_peer_config(peer_options={"num_householder": 2})
    described = describe_model(config)
    assert ModelConfig(**described) == config and described["peer_layer"] == "FakeDelta"


def test_rules_are_read_without_torch():
    program = "import sys, prism_lm.model.peer_rules; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
