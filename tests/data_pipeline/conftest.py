"""Prepared folders that the tests of this room share; a test that damages one works on a copy."""

import shutil
from pathlib import Path

import pytest
from hypothesis import settings

from data_pipeline.synthetic import write_synthetic_dataset

settings.register_profile("machine-independent", deadline=None, derandomize=True)
settings.load_profile("machine-independent")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 1,600 training rows of 64 tokens in about ten shards of sources alpha and beta."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    return write_synthetic_dataset(folder, vocab_size=512, row_tokens=64, documents=500, shard_mib=0.02)


@pytest.fixture
def prepared_copy(prepared: Path, tmp_path: Path) -> Path:
    """A copy of `prepared` to be damaged."""
    return Path(shutil.copytree(prepared, tmp_path / "copy"))
