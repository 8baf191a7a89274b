"""flash-linear-attention's Gated DeltaNet weights in our model: the same logits as the paper's loop, in fp64."""

import pytest
import torch

from prism_lm.export.fla import read_fla
from prism_lm.model.lm import build_model
from tests.prism_lm.export.fla_folders import SETTINGS, draw_weights, run_loop, write_folder

# All in fp64: what differs is the 1e-6 that stands under our square root of a key's squares and not under the loop's.
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    "change",
    [{}, {"tie_word_embeddings": True}, {"num_v_heads": 4}, {"expand_v": 1, "head_dim": 32}],
    ids=["plain", "tied", "shared keys", "equal widths"],
)
def test_imported_model_computes_the_logits_of_the_papers_loop(tmp_path, change):
    settings = SETTINGS | change
    weights = draw_weights(settings)
    config, ours = read_fla(write_folder(tmp_path / "peer", settings, weights))
    model = build_model(config, seed=0, dtype=torch.float64)
    model.load_state_dict(ours)
    input_ids = torch.randint(settings["vocab_size"], (70,), generator=torch.Generator().manual_seed(4))
    expected = run_loop(settings, weights, input_ids)
    actual = model.logits(input_ids[None])[0][0]
    assert (actual - expected).norm() < TOLERANCE * expected.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"allow_neg_eigval": True}, "allow_neg_eigval=False, not True"),
        ({"attn": {"layers": [1]}}, "attn=None"),
        ({"model_type": "gla"}, "model_type=gated_deltanet, not gla"),
    ],
)
def test_settings_that_ours_cannot_compute_are_refused_by_name(tmp_path, change, message):
    folder = write_folder(tmp_path / "peer", SETTINGS | change, draw_weights(SETTINGS))
    with pytest.raises(ValueError, match=message):
        read_fla(folder)


def test_missing_and_left_over_weights_are_named(tmp_path):
    weights = draw_weights(SETTINGS)
    more = weights | {"model.layers.0.attn.extra.weight": torch.ones(2)}
    with pytest.raises(ValueError, match=r"no weights but Gated DeltaNet's, but has .*attn\.extra"):
        read_fla(write_folder(tmp_path / "more", SETTINGS, more))
    del weights["model.layers.1.attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"the weight model\.layers\.1\.attn\.k_proj\.weight"):
        read_fla(write_folder(tmp_path / "fewer", SETTINGS, weights))


@pytest.mark.parametrize("key", ["num_heads", "norm_eps"])
def test_missing_settings_are_named(tmp_path, key):
    settings = {name: value for name, value in SETTINGS.items() if name != key}
    with pytest.raises(ValueError, match=f"must have the key {key}"):
        read_fla(write_folder(tmp_path / "peer", settings, {"model.norm.weight": torch.ones(2)}))


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must hold config\.json"):
        read_fla(tmp_path)
