"""Reading checkpoints: the newest complete one, its weights, its trainer state, whether it fits a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prism_lm.checkpoint.folder import TRAINER_NAME, WEIGHTS_NAME, list_complete, read_json

if TYPE_CHECKING:
    from torch import nn


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    complete = list_complete(run_dir)
    return complete[-1] if complete else None


def read_trainer(folder: Path) -> dict[str, Any]:
    """What trainer.json holds: step, tokens, world size, fingerprints, settings."""
    return cast(dict[str, Any], read_json(folder / TRAINER_NAME))


def check_fits(folder: Path, trainer: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises ValueError for the first setting in which the run differs from the checkpoint."""
    for key, value in expected.items():
        saved = trainer.get(key)
        if saved == value:
            continue
        remedy = f"set {key}={saved}, or choose another run_dir"
        if key == "world_size":
            remedy = f"start {saved} processes (torchrun --nproc-per-node), or choose another run_dir"
        if key.startswith("fingerprint."):
            remedy = f"restore the settings of {key.removeprefix('fingerprint.')}, or choose another run_dir"
        raise ValueError(
            f"{key}={value} must equal {key}={saved} of the checkpoint {folder}, which resumes only as it was "
            f"written; {remedy}"
        )


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
