"""Where no cluster can run, its tests are skipped with the reason; where they are required, they fail with it."""

import os

import pytest

from tests.slurm.cluster import skip_without_cluster


def test_machine_without_root_skips_and_fails_where_a_cluster_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.delenv("PRISM_CLUSTER_TESTS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs root"):
        skip_without_cluster()
    monkeypatch.setenv("PRISM_CLUSTER_TESTS", "required")
    with pytest.raises(pytest.fail.Exception, match=r"required but .* needs root"):
        skip_without_cluster()
