import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from prism_lm.export.folder import INDEX_NAME, WEIGHTS_NAME, read_prism


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "prism"}))
    save_file({"model.embedding.weight": torch.zeros(8, 4)}, tmp_path / WEIGHTS_NAME)
    return tmp_path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("config.json", cut, "config.json must be JSON"),
        ("config.json", lambda path: path.write_bytes(b"\xff"), "config.json must be JSON"),
        ("config.json", lambda path: path.write_text("[]"), "config.json must be a JSON object"),
        (
            "config.json",
            lambda path: path.write_text('{"model_type": "prism", "num_layers": "two"}'),
            "config.json must describe a model",
        ),
        (WEIGHTS_NAME, cut, f"{WEIGHTS_NAME} must be a whole safetensors file"),
        (WEIGHTS_NAME, lambda path: path.write_bytes(b""), f"{WEIGHTS_NAME} must be a whole safetensors file"),
        (INDEX_NAME, lambda path: path.write_text("{"), f"{INDEX_NAME} must be JSON"),
    ],
    ids=["cut", "bytes", "list", "type", "cut-weights", "no-weights", "index"],
)
def test_folder_that_was_not_copied_whole_is_refused_by_the_name_of_the_file(
    name: str, spoil: Callable[[Path], None], words: str, folder: Path
) -> None:
    assert read_prism(folder)[1].keys() == {"embedding.weight"}
    spoil(folder / name)
    with pytest.raises(ValueError, match=words) as caught:
        read_prism(folder)
    assert "\n" not in str(caught.value)
