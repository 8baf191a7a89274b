"""What sinfo prints of partitions is read as it is meant, and times as SLURM reads them."""

from pathlib import Path

import pytest

from launcher.slurm_partitions import list_partitions, parse_gpus, parse_time, spell_time
from tests.launcher.fake_slurm import FakeSlurm, put_on_path


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = FakeSlurm(tmp_path / "fake slurm")
    put_on_path(made, monkeypatch)
    return made


def test_partitions_tell_limits_nodes_and_gpus_by_type(fake: FakeSlurm) -> None:
    fake.install()
    h100, a100, cpu, old = list_partitions()
    assert (h100.partition, h100.is_default, h100.limit_s, h100.most_nodes) == ("gpu", True, 86400, 4)
    assert (h100.count_gpus(), h100.count_gpus("h100"), h100.count_gpus("a100"), a100.gpus) == (8, 8, 0, {"a100": 4})
    assert (cpu.is_default, cpu.limit_s, cpu.most_nodes, cpu.gpus, cpu.cpus) == (False, None, None, {}, 4)
    assert cpu.is_up and not old.is_up


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:8", {"": 8}),
        ("gpu:a100:4(S:0,1),gpu:h100:2(S:2)", {"a100": 4, "h100": 2}),
        ("nvme:1,gpu:tesla:2", {"tesla": 2}),
        ("gpumem:80", {}),
    ],
)
def test_gpus_are_read_out_of_all_generic_resources(gres: str, gpus: dict[str, int]) -> None:
    assert parse_gpus(gres) == gpus


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("5:30", 330),
        ("12:00:00", 43200),
        ("2-12", 216000),
        ("1-00:30", 88200),
        ("1-00:00:05", 86405),
        ("infinite", None),
        ("UNLIMITED", None),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert parse_time(text) == seconds
    if seconds is not None:
        assert parse_time(spell_time(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "2h", "1:2:3:4", "-5"])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="must be a time as SLURM writes it; for example 12:00:00"):
        parse_time(text)
