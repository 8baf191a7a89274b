"""Named collectives: identity alone, the same words on every rank together."""

from typing import Any

import pytest
import torch

from prism_lm.parallel.collectives import (
    RunFailed,
    broadcast_object,
    call_together,
    describe_error,
    gather_objects,
    naming_missing,
    raise_together,
    sum_integers,
    sum_tensor,
)
from prism_lm.parallel.mesh import process_group
from tests.harness import read_ranks, run_on


def test_collectives_are_the_identity_without_a_process_group() -> None:
    assert sum_integers([3, 4]) == [3, 4]
    assert gather_objects("a") == ["a"] and broadcast_object("a") == "a"
    assert call_together(lambda: 3) == 3
    tensor = torch.tensor(2.0)
    assert sum_tensor(tensor) == tensor and sum_tensor(tensor) is not tensor
    raise_together(None)
    with pytest.raises(RunFailed, match=r"^disk full$"):
        raise_together(OSError("disk full"))


def use_collectives() -> list[Any]:
    with process_group(read_ranks()):
        rank = read_ranks().rank
        tensor = torch.tensor([1.0 + rank])
        outcome: list[Any] = [sum_integers([rank, 10]), gather_objects(f"of {rank}")]
        outcome += [sum_tensor(tensor).item(), broadcast_object(f"from {rank}"), tensor.item()]
        raise_together(None)
        try:
            raise_together(OSError("shard.3 is truncated") if rank == 1 else None)
        except RunFailed as error:
            outcome.append(str(error))
        with pytest.raises(RunFailed, match=r"^disk full \(rank 0 of 2\)$"):
            call_together(lambda: fail_on(0, rank))
        return outcome


def fail_on(failing: int, rank: int) -> int:
    if rank == failing:
        raise OSError("disk full")
    return rank


def test_collectives_agree_on_two_ranks() -> None:
    first, second = run_on(2, use_collectives)
    assert first[:4] == second[:4] == [[1, 20], ["of 0", "of 1"], 3.0, "from 0"]
    assert (first[4], second[4]) == (1.0, 2.0)
    assert first[5] == second[5] == "shard.3 is truncated (rank 1 of 2)"


@pytest.mark.parametrize(
    ("error", "text"), [(OSError("no space"), "no space"), (KeyError("a"), "KeyError: 'a'"), (OSError(), "OSError")]
)
def test_error_is_described_in_its_own_words(error: Exception, text: str) -> None:
    assert describe_error(error) == text


def lose_partner() -> str:
    with process_group(read_ranks()):
        if read_ranks().rank == 1:
            return "left"
        try:
            sum_integers([1])
        except RuntimeError as error:
            return describe_error(error)
        return "no error"


def test_lost_partner_is_named_as_such() -> None:
    first, second = run_on(2, lose_partner)
    assert second == "left" and first.startswith("another process of the run ended or could not be reached")


def test_lost_partner_is_named_by_who_can_tell_and_asked_for_once() -> None:
    asked: list[int] = []

    def find_missing() -> list[str]:
        asked.append(1)
        return ["rank 1 (host, pid 7)", "rank 3 (host, pid 9)"]

    error = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2000")
    with naming_missing(find_missing):
        words = describe_error(error)
        assert describe_error(OSError("no space")) == "no space"
    assert words.startswith(
        "rank 1 (host, pid 7), rank 3 (host, pid 9) of the run ended or could not be reached; its own"
    )
    assert describe_error(error) == words and len(asked) == 1
    assert describe_error(RuntimeError(str(error))).startswith("another process of the run ended")
