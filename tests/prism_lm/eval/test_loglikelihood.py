import math
import random
from functools import cache
from typing import Any

import pytest
import torch

from prism_lm.eval.batch_plan import Budget, choose_batch_tokens, pack, plan_batches, share_out
from prism_lm.eval.loglikelihood import Likelihood, ScoredRow, measure_budget, score_rows, select_rows
from prism_lm.eval.token_tree import build_tree
from prism_lm.model.lm import LanguageModel
from prism_lm.parallel.collectives import RunFailed
from prism_lm.parallel.mesh import process_group
from tests.harness import read_ranks, run_on
from tests.prism_lm.model.builders import FAMILIES, build_small

VOCAB = 61


def build_rows() -> list[ScoredRow]:
    """Six questions, most after shared examples, three answers each, some of one token; rows that share nothing; a row
    that another begins with; one that is longer than a batch."""
    generator = random.Random(5)

    def draw(count: int) -> list[int]:
        return [generator.randrange(VOCAB) for _ in range(count)]

    examples = draw(37)
    rows: list[ScoredRow] = []
    for question in range(6):
        asked = (examples if question < 4 else []) + draw(18 + 7 * (question % 3))
        answers = [draw(1 + answer * (question % 2)) for answer in range(3)]
        rows += [ScoredRow(asked + answer, len(answer)) for answer in answers if answer]
    alone = [ScoredRow(row, len(row) - 1) for row in (draw(2), draw(33), draw(90))]
    beginning = ScoredRow(list(rows[0].tokens[:-9]), 20)
    return [*rows, *alone, beginning, ScoredRow(draw(300), 250)]


ROWS = build_rows()


@cache
def build_model(family: str, dtype: torch.dtype) -> LanguageModel:
    """Of one family, always with the same weights."""
    model = build_small(FAMILIES[family], dtype=torch.float32)
    return model.to(dtype)


@cache
def score_all_singly(family: str, dtype: torch.dtype) -> list[Likelihood]:
    """One forward pass a row, no state, no padding."""
    return [score_singly(build_model(family, dtype), row) for row in ROWS]


@torch.no_grad()
def score_singly(model: LanguageModel, row: ScoredRow) -> Likelihood:
    ids = torch.tensor([list(row.tokens)], device=model.embedding.weight.device)
    starts = torch.zeros_like(ids[:, :-1], dtype=torch.bool)
    starts[0, 0] = True
    logits = model(ids[:, :-1], starts, None)[0, -row.num_scored :].double()
    targets = ids[0, -row.num_scored :]
    log_likelihoods = logits.log_softmax(-1).gather(1, targets[:, None])
    return Likelihood(float(log_likelihoods.sum()), bool((logits.argmax(-1) == targets).all()))


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("batch_tokens", [128, 100_000])
def test_shared_beginnings_score_as_rows_read_one_by_one(family: str, batch_tokens: int) -> None:
    expected = score_all_singly(family, torch.float64)
    found = score_rows(build_model(family, torch.float64), ROWS, batch_tokens=batch_tokens)
    assert [one.log_likelihood for one in found] == pytest.approx([one.log_likelihood for one in expected], rel=1e-10)
    assert [one.is_greedy for one in found] == [one.is_greedy for one in expected]


def test_in_fp32_shared_beginnings_are_as_near_to_fp64_as_rows_read_one_by_one(family: str) -> None:
    exact = score_all_singly(family, torch.float64)
    allowed = measure_error(score_all_singly(family, torch.float32), exact)
    error = measure_error(score_rows(build_model(family, torch.float32), ROWS, batch_tokens=128), exact)
    assert error <= 2 * allowed + torch.finfo(torch.float32).eps, (error, allowed)


def measure_error(found: list[Likelihood], exact: list[Likelihood]) -> float:
    """The largest relative error of a sum of log-likelihoods."""
    pairs = zip(found, exact, strict=True)
    return max(abs(one.log_likelihood - other.log_likelihood) / abs(other.log_likelihood) for one, other in pairs)


def test_greedy_rows_are_those_whose_every_token_is_the_likeliest() -> None:
    model = build_small(FAMILIES["prism"])
    tokens = [1, 2, 3]
    for _ in range(4):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]), None, None)[0, -1].argmax()))
    other = [*tokens[:5], (tokens[5] + 1) % VOCAB, tokens[6]]
    rows = [ScoredRow(tokens, 4), ScoredRow(tokens[:5], 2), ScoredRow(other, 4), ScoredRow(other, 1)]
    assert [one.is_greedy for one in score_rows(model, rows, batch_tokens=100)][:3] == [True, True, False]


def test_order_of_the_rows_does_not_change_a_bit() -> None:
    model = build_small(FAMILIES["hybrid"], dtype=torch.float32)
    places = list(range(len(ROWS)))
    random.Random(1).shuffle(places)
    found = score_rows(model, ROWS, batch_tokens=256)
    shuffled = score_rows(model, [ROWS[place] for place in places], batch_tokens=256)
    assert shuffled == [found[place] for place in places]


def score_on_ranks() -> list[Likelihood]:
    ranks = read_ranks()
    with process_group(ranks):
        return score_rows(build_small(FAMILIES["prism"], dtype=torch.float32), ROWS, batch_tokens=256, ranks=ranks)


def test_two_processes_give_every_bit_that_one_gives() -> None:
    (alone,) = run_on(1, score_on_ranks)
    assert run_on(2, score_on_ranks) == [alone, alone]


def fail_on_one_rank() -> str:
    ranks = read_ranks()
    model = build_small(FAMILIES["prism"])
    if ranks.rank == 1:
        model.read = raise_out_of_memory  # type: ignore[method-assign]
    with process_group(ranks), pytest.raises(RunFailed) as caught:
        score_rows(model, ROWS, batch_tokens=256, ranks=ranks)
    return str(caught.value)


def raise_out_of_memory(*arguments: Any, **settings: Any) -> Any:
    raise RuntimeError("out of memory")


def test_what_fails_on_one_process_ends_all_of_them() -> None:
    assert run_on(2, fail_on_one_rank) == ["out of memory (rank 1 of 2)"] * 2


def test_long_rows_are_read_in_pieces_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_small(FAMILIES["prism"])
    sizes: list[int] = []
    read = model.read

    def note(ids_BT: torch.Tensor, **settings: Any) -> Any:
        sizes.append(ids_BT.numel())
        return read(ids_BT, **settings)

    monkeypatch.setattr(model, "read", note)
    score_rows(model, ROWS, batch_tokens=128)
    assert max(sizes) <= 128
    assert sum(sizes) < sum(len(row.tokens) for row in ROWS)


def test_no_rows_need_no_model_call() -> None:
    assert score_rows(build_small(FAMILIES["prism"]), [], batch_tokens=1) == []


@pytest.mark.parametrize("family_name", ["prism", "hybrid"])
def test_budget_knows_what_the_state_of_a_row_takes(family_name: str) -> None:
    model = build_small(FAMILIES[family_name])
    budget = measure_budget(model, 128)
    state = model.read(torch.zeros(3, 11, dtype=torch.int64))[1]
    assert 3 * (budget.row_state_bytes + 11 * budget.token_state_bytes) == state.num_bytes()
    assert (budget.token_state_bytes > 0) == (family_name == "hybrid")


def test_budget_bounds_padded_tokens_and_bytes_of_state_but_lets_one_row_pass() -> None:
    budget = Budget(batch_tokens=100, row_state_bytes=10, token_state_bytes=1, state_bytes=200)
    assert budget.fits(1, 1000)
    assert budget.fits(5, 20) and not budget.fits(6, 20)
    assert budget.fits(10, 10) and not budget.fits(10, 10, tokens_before=1)
    assert [len(part) for part in pack([3, 50, 30, 40, 2], lambda item: item, budget)] == [2, 3]


def test_no_budget_means_no_batch() -> None:
    with pytest.raises(ValueError, match="batch_tokens=0 must be at least 1"):
        Budget(batch_tokens=0)


@pytest.mark.parametrize("batch_tokens", [1, 60, 500])
def test_plan_holds_every_node_once_and_only_pads_what_it_may(batch_tokens: int) -> None:
    tree = build_tree([row.tokens for row in ROWS], grain_tokens=8)
    batches = [batch for top in plan_batches(tree, Budget(batch_tokens=batch_tokens)) for batch in top.walk()]
    assert sorted(node for batch in batches for node in batch.nodes) == list(range(len(tree.nodes)))
    for batch in batches:
        lengths = {len(tree.nodes[node].tokens) for node in batch.nodes}
        assert len(batch.nodes) == 1 or batch.padded_tokens <= batch_tokens
        continues = bool(batch.parent_rows)
        assert not continues or len(lengths) == 1 or all(tree.nodes[node].is_leaf for node in batch.nodes)


@pytest.mark.parametrize(("most", "num_tokens", "chosen"), [(8192, 10**6, 8192), (8192, 10**5, 6250), (500, 10, 500)])
def test_little_work_is_cut_in_batches_that_many_processes_can_share(most: int, num_tokens: int, chosen: int) -> None:
    assert choose_batch_tokens(most, num_tokens) == chosen


def test_work_is_shared_in_order_and_evenly() -> None:
    assert share_out([4, 4, 4, 4], 2) == [0, 0, 1, 1]
    assert share_out([1] * 10, 3) == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert share_out([5], 4) == [2]
    assert share_out([0, 0], 2) == [0, 0]


def test_a_row_of_the_state_may_be_taken_several_times() -> None:
    model = build_small(FAMILIES["hybrid"])
    state = model.read(torch.tensor([[1, 2], [3, 4]]))[1]
    twice = select_rows(state, [1, 0, 1])
    alone = model.read(torch.tensor([[3, 4]]))[1]
    with torch.no_grad():
        logits = model.logits(torch.tensor([[5], [5], [5]]), state=twice)[0]
        expected = model.logits(torch.tensor([[5]]), state=alone)[0]
    assert torch.allclose(logits[0], expected[0], rtol=1e-12) and torch.equal(logits[0], logits[2])
    assert not math.isclose(float(logits[0, 0, 0]), float(logits[1, 0, 0]))
