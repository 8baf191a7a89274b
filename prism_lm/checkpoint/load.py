"""Reading checkpoints: the newest complete one, its weights, its trainer state, whether it fits a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prism_lm.checkpoint.folder import (
    TRAINER_NAME,
    WEIGHTS_NAME,
    check_hashes,
    check_sizes,
    describe_remedy,
    list_published,
    rank_file,
    read_json,
    read_step,
)

if TYPE_CHECKING:
    from torch import nn

FORMAT = 2

# Where a user finds what a fingerprint stands for, and what makes it equal again.
_FINGERPRINTED = {
    "fingerprint.data": ("data.path", "point data.path at the data that the run was started with"),
    "fingerprint.model": ("model.*", "restore the model's settings from the run's config.yaml"),
}


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint with the highest step, or None where the run has none. Raises ValueError where it is damaged, as
    far as that shows without reading all of it: sizes, and the hash of the file that says what it is."""
    published = list_published(run_dir)
    if not published:
        return None
    check_sizes(published[-1])
    check_hashes(published[-1], [TRAINER_NAME])
    return published[-1]


def read_trainer(folder: Path) -> dict[str, Any]:
    """What trainer.json holds: step, tokens, world size, fingerprints, settings. Raises ValueError for another format
    than this program writes."""
    trainer = cast(dict[str, Any], read_json(folder / TRAINER_NAME, remedy=describe_remedy(folder)))
    if trainer.get("format") != FORMAT:
        raise ValueError(
            f"{folder / TRAINER_NAME} must have format={FORMAT}, not {trainer.get('format')}; resume with the commit "
            "in the run's environment.json, or choose another run_dir"
        )
    if trainer["step"] != read_step(folder):
        raise ValueError(
            f"{folder} must be named step_{trainer['step']}, since its {TRAINER_NAME} has step={trainer['step']}; "
            "rename it"
        )
    return trainer


def read_rank_state(folder: Path, rank: int) -> dict[str, Any]:
    """One rank's generators, as values and tensors alone: nothing in the file is executed."""
    import torch

    return cast(dict[str, Any], torch.load(rank_file(folder, rank), map_location="cpu", weights_only=True))


def check_fits(folder: Path, trainer: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises ValueError for the first setting in which the run differs from the checkpoint."""
    for key, value in expected.items():
        saved = trainer.get(key)
        if saved == value:
            continue
        now, then, remedy = f"{key}={value}", f"{key}={saved}", f"set {key}={saved}"
        if key in _FINGERPRINTED:
            name, remedy = _FINGERPRINTED[key]
            now, then = (f"{name} (fingerprint {_shorten(str(print_))})" for print_ in (value, saved))
        raise ValueError(f"{now} must equal {then} of the checkpoint {folder}; {remedy}, or choose another run_dir")


def _shorten(fingerprint: str) -> str:
    """The first digits of a bare hash; a description in words as it is."""
    return fingerprint if " " in fingerprint else fingerprint[:12]


def load_weights(model: "nn.Module", folder: Path) -> None:
    """Copies a checkpoint's weights into an ordinary model, in the model's own dtype and on its device.

    The file holds a shared parameter once, under its first name. Raises ValueError when names or shapes differ.
    """
    from safetensors.torch import load_file

    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise ValueError(f"{path} must exist to load weights from; pass a folder checkpoints/step_<n> of a run")
    weights = load_file(path)
    named = dict(model.named_parameters(remove_duplicate=False))
    present = {id(named[name]) for name in weights if name in named}
    try:
        outcome = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{path} must hold this model's shapes; {error}; build it from the run's config") from error
    missing = [name for name in outcome.missing_keys if name not in named or id(named[name]) not in present]
    if missing or outcome.unexpected_keys:
        raise ValueError(
            f"{path} must hold exactly this model's weights; missing {missing[:3]}, unknown "
            f"{outcome.unexpected_keys[:3]}; build the model from the run's config.yaml"
        )
