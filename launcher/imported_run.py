"""A run folder made of weights that came from elsewhere, as if a run had saved itself before its first step.

`prism evaluate`, `generate` and `export` read it like any other. `prism train` begins a new training from these
weights: step 0, an optimizer without moments, the data from its start.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.manifest import check_tokenizer
from data_pipeline.tokenizer import Tokenizer
from launcher.config import RunConfig, dump_config, fingerprint_model
from launcher.environment import detect_environment
from launcher.provenance import describe_environment
from launcher.run_folder import find_existing
from prism_lm.checkpoint.folder import partial_folder, publish, step_folder, write_json, write_whole
from prism_lm.checkpoint.fragments import OPTIMIZER_NAME, Kind, Piece, build_index
from prism_lm.checkpoint.share import MainShare, Share
from prism_lm.train.lineage import LINEAGE_NAME, RESULT_NAME, append_line

if TYPE_CHECKING:
    from torch import Tensor

    from prism_lm.train.state import TrainRun

NO_DATA = "none was given to prism import; to train, import again with data.path=PATH"


def check_free(run_dir: Path) -> None:
    """Raises ValueError where the folder is that of a run already, and where none can be made."""
    nearest = find_existing(run_dir)
    if not nearest.is_dir():
        raise ValueError(f"RUN={run_dir} must be a new folder, but {nearest} is a file; name another one")
    for name in ("config.yaml", "checkpoints"):
        if (run_dir / name).exists():
            raise ValueError(f"RUN={run_dir} must be a new folder, but holds {name}; name another one")


def write_imported_run(
    run_dir: Path,
    config: RunConfig,
    weights: "Mapping[str, Tensor]",
    tokenizer_model: bytes,
    *,
    origin: Mapping[str, Any],
) -> Path:
    """Make the folder: a published checkpoint of step 0, tokenizer.model, environment.json, lineage, config.yaml last.

    weights: by our names, cast to the dtype of config.train.precision; a shared one once. origin: where they came from,
    for the lineage. With config.data.path the data is opened and fixed, so that the run can be trained. Returns the
    checkpoint's folder. Raises ValueError for weights that are not the model's, a tokenizer larger than its vocabulary,
    or a folder of a run; DataError for data that does not fit.
    """
    check_free(run_dir)
    config = replace(config, run_dir=str(run_dir))
    tokenizer = Tokenizer(tokenizer_model, name="tokenizer.model")
    _check_vocabulary(config, tokenizer)
    held = fit_weights(config, weights)
    run, position = _describe_run(config, tokenizer)
    checkpoint = _write_checkpoint(run, held, position)
    _write_records(run, origin)
    return checkpoint


def _write_records(run: "TrainRun", origin: Mapping[str, Any]) -> None:
    """What stands in a run folder besides checkpoints; config.yaml, which makes it a run, last."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": "import", "step": 0, **origin}
    result = {"status": "imported", "step": 0, "tokens": 0, "error": None, "starts": 1}
    for name, content in run.files.items():
        write_whole(run.run_dir / name, content)
    write_json(run.run_dir / "environment.json", dict(run.environment))
    append_line(run.run_dir / LINEAGE_NAME, line)
    write_json(run.run_dir / RESULT_NAME, result)
    write_whole(run.run_dir / "config.yaml", run.config_yaml.encode())


def _check_vocabulary(config: RunConfig, tokenizer: "Tokenizer") -> None:
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"tokenizer.model must have at most model.vocab_size={config.model.vocab_size} pieces, not "
            f"{tokenizer.vocab_size}; give the tokenizer of these weights"
        )


def fit_weights(config: RunConfig, weights: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """The weights in the model's order and the run's dtype. Raises ValueError for names or shapes of another model."""
    import torch

    from prism_lm.model.lm import build_model
    from prism_lm.train.optimizer_fragments import list_shapes

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.train.precision]
    shapes = list_shapes(build_model(config.model, seed=config.seed, device="meta"))
    missing, unknown = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    if missing or unknown:
        raise ValueError(
            f"the weights must be those of the configuration, but lack {missing[:3]} and have {unknown[:3]} besides; "
            "give the whole folder, as it was exported"
        )
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(
                f"the weight {name} must have shape {shape} by the configuration, not {tuple(weights[name].shape)}; "
                "give the folder as it was exported"
            )
    return {name: weights[name].to(dtype).contiguous() for name in shapes}


def _describe_run(config: RunConfig, tokenizer: "Tokenizer") -> "tuple[TrainRun, dict[str, Any]]":
    """The training, in one process, that would save this checkpoint before its first step; its place in the data."""
    from launcher.run_data import open_loader, open_manifest
    from prism_lm.model.lm import build_model
    from prism_lm.parallel.mesh import Ranks
    from prism_lm.train.state import TrainRun

    data, position = NO_DATA, dict[str, Any]()
    if config.data.path:
        manifest = open_manifest(config)
        check_tokenizer(manifest, tokenizer, name="the tokenizer.model of the weights")
        data, position = manifest.describe(), open_loader(config, Ranks(), split="train").state_dict()
    run = TrainRun(
        run_dir=Path(config.run_dir),
        train=config.train,
        parallel=config.parallel,
        ranks=Ranks(),
        seed=config.seed,
        build_model=lambda: build_model(config.model, seed=config.seed),
        build_train_loader=lambda: open_loader(config, Ranks(), split="train"),
        build_validation_loader=None,
        flops_per_token=None,
        config_yaml=dump_config(config),
        environment=describe_environment(detect_environment(os.environ)),
        files={"tokenizer.model": tokenizer.model},
        fingerprints={"model": fingerprint_model(config.model), "data": data},
    )
    return run, position


def _write_checkpoint(run: "TrainRun", weights: "dict[str, Tensor]", position: dict[str, Any]) -> Path:
    """Publish the checkpoint of step 0, by the trainer's own writer: masters are the weights, moments are zero."""
    import torch

    from prism_lm.train.state import TrainState

    masters = {name: weight.float().flatten() for name, weight in weights.items()}
    moments = {name: torch.zeros_like(master) for name, master in masters.items()}
    kinds: dict[Kind, dict[str, Tensor]] = {"master": masters, "exp_avg": moments, "exp_avg_sq": moments}
    pieces = [Piece(name=name, start=0, numel=master.numel()) for name, master in masters.items()]
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    share = Share(
        rank=0,
        optimizer={f"{kind}/{name}": tensor.clone() for kind, held in kinds.items() for name, tensor in held.items()},
        rank_state=draw_generators(run.seed),
        main=MainShare(
            weights=weights,
            index=build_index(shapes, [pieces], applied_steps=0),
            trainer={**TrainState().describe(run), "loader": position},
            probe={},
        ),
    )
    partial, folder = partial_folder(run.run_dir, 0), step_folder(run.run_dir, 0)
    for name in ("ranks", OPTIMIZER_NAME):
        (partial / name).mkdir(parents=True)
    publish(partial, folder, share.write(partial))
    return folder


def draw_generators(seed: int) -> dict[str, Any]:
    """The generators with which a process begins to train; this process's own stay as they are."""
    from prism_lm.train.state import capture_generators, restore_generators, seed_generators

    former = capture_generators()
    seed_generators(seed + 1)
    try:
        return capture_generators()
    finally:
        restore_generators(former)
