"""A run's data as its configuration names it: the manifest, the tokenizer's copy in the run folder, loaders."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from launcher.config import RunConfig
from prism_lm.parallel.mesh import Ranks

if TYPE_CHECKING:
    from data_pipeline.loader import Loader
    from data_pipeline.manifest import Manifest

Split = Literal["train", "validation", "test"]


def open_manifest(config: RunConfig) -> "Manifest":
    """Read the manifest and check that the run can read what it describes.

    Raises ValueError for a key that must change, DataError for a file that is missing or damaged.
    """
    from data_pipeline.manifest import check_row_tokens, check_vocabulary
    from data_pipeline.preflight import fetch_manifest, make_cache_folder

    if not config.data.path:
        raise ValueError("data.path= must be a folder that `prism prepare` wrote; for example data.path=data/my_text")
    make_cache_folder(cache_folder(config))
    manifest = fetch_manifest(config.data.path, cache_folder(config), config.data.timeout_s)
    check_vocabulary(manifest, config.model.vocab_size)
    check_row_tokens(manifest, config.data.row_tokens)
    return manifest


def keep_tokenizer(config: RunConfig) -> None:
    """Copy the data's tokenizer.model into the run folder, so that the run can be read without its data."""
    from data_pipeline.manifest import TOKENIZER_NAME
    from data_pipeline.preflight import fetch_file

    fetched = fetch_file(config.data.path, TOKENIZER_NAME, cache_folder(config), config.data.timeout_s)
    shutil.copyfile(fetched, Path(config.run_dir) / TOKENIZER_NAME)


def plan_loader(config: RunConfig, ranks: Ranks, *, split: Split) -> Callable[[], "Loader"]:
    """A function that opens the split: endless for training, one pass otherwise."""

    def open_loader() -> "Loader":
        from data_pipeline.loader import build_loader

        return build_loader(
            config.data,
            split=split,
            rank=ranks.rank,
            world_size=ranks.world_size,
            micro_batch_rows=config.train.micro_batch_rows,
            global_batch_rows=config.train.global_batch_rows,
            seed=config.seed,
            cache_dir=cache_folder(config),
            endless=split == "train",
        )

    return open_loader


def open_one_pass(config: RunConfig, *, split: Split, micro_batch_rows: int) -> "Loader":
    """Every row of a split once, in order, in one process."""
    from data_pipeline.loader import build_loader

    return build_loader(
        replace(config.data, shuffle=False, weights={}),
        split=split,
        rank=0,
        world_size=1,
        micro_batch_rows=micro_batch_rows,
        seed=config.seed,
        cache_dir=cache_folder(config),
        endless=False,
    )


def cache_folder(config: RunConfig) -> Path:
    """Where the run's own copies of shards, lock files and notes live."""
    return Path(config.run_dir) / "cache"
