"""Settings that cannot work are refused where they are typed, with key, rule and remedy."""

import subprocess
import sys

import pytest

from data_pipeline.config import DataConfig, PrepareConfig


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"workers": -2}, r"data\.workers=-2 must be at least -1; use -1"),
        ({"prefetch_batches": 0}, r"data\.prefetch_batches=0 must be -1 or at least 1; use -1"),
        ({"timeout_s": 0.0}, r"data\.timeout_s=0\.0 must be positive; use 45"),
        ({"weights": {"a": -1.0}}, r"data\.weights\.a=-1\.0 must be finite and at least 0; use 0"),
        ({"weights": {"a": 0.0}}, r"data\.weights=\{'a': 0\.0\} must hold a positive weight; use \{\}"),
        ({"num_canonical_nodes": 0}, r"data\.num_canonical_nodes=0 must be at least 1"),
        ({"cache_limit_gib": -1.0}, r"data\.cache_limit_gib=-1\.0 must be at least 0"),
    ],
)
def test_loader_settings_that_cannot_work_are_refused(keys, message) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"output": ""}, "output= must name the folder"),
        ({"vocab_size": 100}, "vocab_size=100 must be at least 300"),
        ({"row_tokens": 0}, "row_tokens=0 must be at least 1"),
        ({"shard_mib": 0.0}, r"shard_mib=0\.0 must be positive"),
        ({"validation_fraction": 1.0}, r"validation_fraction=1\.0 must lie in \[0, 1\)"),
        (
            {"validation_fraction": 0.5, "test_fraction": 0.5},
            r"validation_fraction \+ test_fraction=1\.0 must stay below 1",
        ),
    ],
)
def test_preparation_settings_that_cannot_work_are_refused(keys, message) -> None:
    with pytest.raises(ValueError, match=message):
        PrepareConfig(**{"output": "x", **keys})


def test_the_configuration_loads_nothing_heavy() -> None:
    code = (
        "import sys, data_pipeline.config, data_pipeline.errors; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"
