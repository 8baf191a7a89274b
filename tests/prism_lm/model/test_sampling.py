import pytest
import torch

from prism_lm.model.sampling import BLOCK_NUMBERS, Sampling, UniformNumbers, filter_logits, sample

CPU = torch.device("cpu")


def _logits(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3


@pytest.mark.parametrize("top_k", [1, 3, 40, 100])
def test_top_k_keeps_the_likeliest(top_k):
    for row, kept in zip(_logits(), filter_logits(_logits(), temperature=1, top_k=top_k, top_p=1), strict=True):
        likeliest = sorted(range(40), key=lambda token, row=row: -row[token].item())[:top_k]
        assert set(kept.isfinite().nonzero().flatten().tolist()) == set(likeliest)
        assert torch.equal(kept[likeliest], row[likeliest])


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p):
    for row, kept in zip(_logits(), filter_logits(_logits(), temperature=2, top_k=0, top_p=top_p), strict=True):
        chances = (row / 2).exp() / (row / 2).exp().sum()
        expected, total = set(), 0.0
        for token in sorted(range(40), key=lambda token, row=row: -row[token].item()):
            if total < top_p:
                expected.add(token)
                total += chances[token].item()
        assert set(kept.isfinite().nonzero().flatten().tolist()) == expected


def test_top_k_keeps_no_more_among_equals():
    kept = filter_logits(torch.zeros(1, 8), temperature=1, top_k=3, top_p=1)
    assert kept.isfinite().tolist() == [[True] * 3 + [False] * 5]


def test_sample_follows_the_probabilities():
    """20,000 draws: each frequency within four standard deviations of its probability."""
    chances = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    uniform_B = UniformNumbers([0]).draw(CPU, 20000)[:, 0]
    tokens = sample(chances.log().expand(20000, 4), uniform_B)
    counts = torch.bincount(tokens, minlength=4) / 20000
    assert ((counts - chances).abs() <= 4 * (chances * (1 - chances) / 20000).sqrt()).all()


def test_uniform_number_of_0_draws_no_token_of_probability_0():
    logits_BV = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]])
    for uniform, token in ((0.0, 1), (1 - 2**-53, 2)):
        assert sample(logits_BV, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_likeliest_token_of_known_ids_is_taken_at_temperature_0():
    logits_BV = torch.tensor([[1.0, 5.0, 5.0, 9.0], [7.0, 5.0, 6.0, 9.0]])
    uniform_B = torch.full((2,), 0.99, dtype=torch.float64)
    assert Sampling(temperature=0, num_known_tokens=3).draw(logits_BV, uniform_B).tolist() == [1, 0]


def test_numbers_drawn_in_blocks_are_those_drawn_one_by_one():
    """The numbers, and so the texts, that each row's own generator gives token by token."""
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 8)]
    alone = [[torch.rand(1, generator=g, dtype=torch.float64).item() for g in generators] for _ in range(300)]
    numbers = UniformNumbers([3, 8])
    drawn = torch.cat([numbers.draw(CPU, count) for count in (1, 7, 92, 200)])
    iterated = UniformNumbers([3, 8]).iterate(CPU)
    assert BLOCK_NUMBERS < 300 and drawn.tolist() == alone == [next(iterated).tolist() for _ in range(300)]
