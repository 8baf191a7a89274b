"""Weights into an ordinary model, and whether a checkpoint fits a run."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from prism_lm.checkpoint.folder import WEIGHTS_NAME
from prism_lm.checkpoint.load import check_fits, load_weights, newest_checkpoint


class TiedModel(nn.Module):
    """An embedding whose table is the head's weight too."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_shared_weight_saved_once_reaches_both_places(tmp_path: Path) -> None:
    table = torch.randn(5, 4).bfloat16()
    save_file({"embedding.weight": table}, tmp_path / WEIGHTS_NAME)
    model = TiedModel()
    load_weights(model, tmp_path)
    assert model.head.weight is model.embedding.weight and model.head.weight.dtype == torch.float32
    assert torch.equal(model.head.weight, table.float())


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.safetensors must exist"):
        load_weights(TiedModel(), tmp_path)
    save_file({"embedding.weight": torch.zeros(5, 4), "other": torch.zeros(1)}, tmp_path / WEIGHTS_NAME)
    with pytest.raises(ValueError, match=r"must hold exactly this model's weights; missing \[\], unknown \['other'\]"):
        load_weights(TiedModel(), tmp_path)
    with pytest.raises(ValueError, match="must hold this model's shapes"):
        load_weights(TiedModel(width=3), tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / WEIGHTS_NAME)
    with pytest.raises(ValueError, match=r"missing \['bias'\]"):
        load_weights(nn.Linear(2, 2), tmp_path)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("seed", r"seed=2 must equal seed=1 .* set seed=1, or choose another run_dir"),
        ("train.precision", r"train\.precision=2 must equal .* set train\.precision=1, or choose another run_dir"),
    ],
)
def test_checkpoint_of_another_setting_is_refused_with_the_remedy(key: str, text: str, tmp_path: Path) -> None:
    check_fits(tmp_path, {key: 1}, {key: 1})
    with pytest.raises(ValueError, match=text):
        check_fits(tmp_path, {key: 1}, {key: 2})


@pytest.mark.parametrize(
    ("name", "key", "remedy"),
    [
        ("data", "data.path", "point data.path at the data that the run was started with"),
        ("model", "model.*", "restore the model's settings from the run's config.yaml"),
    ],
)
def test_fingerprints_that_differ_are_named_as_the_user_typed_them_and_short(
    name: str, key: str, remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        check_fits(tmp_path, {f"fingerprint.{name}": "a" * 64}, {f"fingerprint.{name}": "b" * 64})
    short_now, short_then = f"{key} (fingerprint {'b' * 12})", f"{key} (fingerprint {'a' * 12})"
    assert str(caught.value).startswith(f"{short_now} must equal {short_then} of the checkpoint {tmp_path}")
    assert str(caught.value).endswith(f"; {remedy}, or choose another run_dir")


def test_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
