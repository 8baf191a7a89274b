"""A run's data as its configuration names it: the manifest, the tokenizer's copy in the run folder, loaders."""

import platform
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config import RunConfig
from prism_lm.parallel.mesh import Ranks

if TYPE_CHECKING:
    from data_pipeline.loader import Loader
    from data_pipeline.manifest import Manifest, Split
    from data_pipeline.tokenizer import Tokenizer


def open_manifest(config: RunConfig) -> "Manifest":
    """Read the manifest and check that the run can read what it describes.

    Raises ValueError for a key that must change, DataError for a file that is missing or damaged.
    """
    from data_pipeline.manifest import check_row_tokens, check_vocabulary

    manifest = _fetch_manifest(config)
    check_vocabulary(manifest, config.model.vocab_size)
    check_row_tokens(manifest, config.data.row_tokens)
    return manifest


def _fetch_manifest(config: RunConfig) -> "Manifest":
    from data_pipeline.preflight import fetch_manifest, make_cache_folder

    if not config.data.path:
        raise ValueError("data.path= must be a folder that `prism prepare` wrote; for example data.path=data/my_text")
    make_cache_folder(cache_folder(config))
    return fetch_manifest(config.data.path, cache_folder(config), config.data.timeout_s)


def read_tokenizer(config: RunConfig) -> bytes:
    """The data's tokenizer.model, which a run folder keeps so that the run can be read without its data."""
    from data_pipeline.manifest import TOKENIZER_NAME
    from data_pipeline.preflight import fetch_file

    return fetch_file(config.data.path, TOKENIZER_NAME, cache_folder(config), config.data.timeout_s).read_bytes()


def open_loader(config: RunConfig, ranks: Ranks, *, split: "Split") -> "Loader":
    """This rank's slices of micro-batches: endless for training, one pass otherwise, over train.eval_rows of the
    validation rows. Needs no process group.

    Raises ValueError for settings that do not fit one another or the data, DataError for data that fails its checks.
    """
    from data_pipeline.batch import RowSlice
    from data_pipeline.loader import build_loader

    return build_loader(
        config.data,
        split=split,
        rank=ranks.data_rank,
        world_size=ranks.data_world_size,
        row_slice=RowSlice(index=ranks.sequence_rank, count=ranks.sequence_degree),
        micro_batch_rows=config.train.micro_batch_rows,
        global_batch_rows=config.train.global_batch_rows,
        seed=config.seed,
        cache_dir=cache_folder(config),
        endless=split == "train",
        limit_rows=config.train.eval_rows if split == "validation" else 0,
    )


def open_evaluated_data(
    config: RunConfig, run_dir: Path, data_path: str | None, *, tokenizer: "Tokenizer"
) -> tuple[RunConfig, "Manifest"]:
    """The run's configuration pointed at the data to score, where the run folder lies now, and that data's manifest.

    Raises DataError for data that was written with another tokenizer than the run's.
    """
    from data_pipeline.manifest import check_tokenizer

    config = replace(config, run_dir=str(run_dir), data=replace(config.data, path=data_path or config.data.path))
    manifest = _fetch_manifest(config)
    check_tokenizer(manifest, tokenizer, name=f"{run_dir / 'tokenizer.model'}, read with data.path={config.data.path},")
    return replace(config, data=replace(config.data, row_tokens=manifest.row_tokens)), manifest


def open_one_pass(config: RunConfig, *, split: "Split", micro_batch_rows: int, ranks: Ranks | None = None) -> "Loader":
    """Every row of a split once, in order, in one process; this rank's slices of its share of them where several are
    given."""
    from data_pipeline.batch import RowSlice
    from data_pipeline.loader import build_loader

    ranks = ranks or Ranks()

    return build_loader(
        replace(config.data, shuffle=False, weights={}),
        split=split,
        rank=ranks.data_rank,
        world_size=ranks.data_world_size,
        row_slice=RowSlice(index=ranks.sequence_rank, count=ranks.sequence_degree),
        micro_batch_rows=micro_batch_rows,
        seed=config.seed,
        cache_dir=cache_folder(config),
        endless=False,
    )


def cache_folder(config: RunConfig) -> Path:
    """Where this node's copies of shards, lock files and notes live: its own, since nodes may share the run folder."""
    return Path(config.data.cache_dir or Path(config.run_dir) / "cache" / platform.node())
