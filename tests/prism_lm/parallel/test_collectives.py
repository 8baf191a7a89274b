"""Named collectives: identity alone, the same words on every rank together."""

from typing import Any

import pytest
import torch

from prism_lm.parallel.collectives import (
    RunFailed,
    describe_error,
    gather_objects,
    raise_together,
    sum_integers,
    sum_tensor,
    take_from_main,
)
from prism_lm.parallel.mesh import Ranks, process_group
from tests.harness import run_on


def test_collectives_are_the_identity_without_a_process_group() -> None:
    assert sum_integers([3, 4]) == [3, 4]
    assert gather_objects("a") == ["a"]
    assert take_from_main("a") == "a"
    tensor = torch.tensor(2.0)
    assert sum_tensor(tensor) == tensor and sum_tensor(tensor) is not tensor
    raise_together(None)
    with pytest.raises(RunFailed, match=r"^disk full$"):
        raise_together(OSError("disk full"))


def use_collectives() -> list[Any]:
    with process_group(Ranks.from_environment()):
        rank = Ranks.from_environment().rank
        tensor = torch.tensor([1.0 + rank])
        outcome: list[Any] = [sum_integers([rank, 10]), gather_objects(f"of {rank}"), take_from_main(rank)]
        outcome += [sum_tensor(tensor).item(), tensor.item()]
        raise_together(None)
        try:
            raise_together(OSError("shard.3 is truncated") if rank == 1 else None)
        except RunFailed as error:
            outcome.append(str(error))
        return outcome


def test_collectives_agree_on_two_ranks() -> None:
    first, second = run_on(2, use_collectives)
    assert first[:4] == second[:4] == [[1, 20], ["of 0", "of 1"], 0, 3.0]
    assert (first[4], second[4]) == (1.0, 2.0)
    assert first[5] == second[5] == "shard.3 is truncated (rank 1 of 2)"


@pytest.mark.parametrize(
    ("error", "text"), [(OSError("no space"), "no space"), (KeyError("a"), "KeyError: 'a'"), (OSError(), "OSError")]
)
def test_error_is_described_in_its_own_words(error: Exception, text: str) -> None:
    assert describe_error(error) == text
