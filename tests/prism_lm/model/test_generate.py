from dataclasses import replace

import pytest
import torch

from prism_lm.model.generate import filter_logits, generate, pad_left, sample
from tests.prism_lm.model.builders import FAMILIES, SMALL, build_small

PROMPT = [1, 7, 7, 30, 12, 45, 2]
PROMPTS = [PROMPT, [1], [1, *range(10, 34)]]


@pytest.mark.parametrize("family", [*FAMILIES, "no_anchor"])
@torch.no_grad()
def test_greedy_decode_is_the_argmax_of_the_full_forward(family):
    model = build_small({**FAMILIES, "no_anchor": replace(SMALL, anchor="none")}[family])
    tokens = list(PROMPT)
    for _ in range(24):
        tokens.append(int(model.logits(torch.tensor([tokens]))[0][0, -1].argmax()))
    assert generate(model, [PROMPT], max_new_tokens=24, temperature=0) == [tokens[len(PROMPT) :]]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_in_a_batch_reads_as_alone(family):
    model = build_small(FAMILIES[family])
    alone = [generate(model, [prompt], max_new_tokens=10, temperature=0)[0] for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=10, temperature=0) == alone


@torch.no_grad()
def _state_sizes(family: str) -> list[int]:
    model, sizes = build_small(FAMILIES[family]), []
    _, state = model.logits(torch.tensor([PROMPT]))
    for token in range(20):
        sizes.append(state.num_bytes())
        _, state = model.logits(torch.tensor([[token]]), state=state)
    return sizes


@pytest.mark.parametrize("family", ["prism", "gated_delta"])
def test_recurrent_state_keeps_its_size(family):
    assert len(set(_state_sizes(family))) == 1


def test_attention_cache_grows_by_a_token_a_step():
    sizes = torch.tensor(_state_sizes("attention"))
    assert set(sizes.diff().tolist()) == {2 * (2 * 2 * 16 * 8 + 8)}


def test_seed_decides_what_is_sampled():
    model = build_small(SMALL)
    texts = [generate(model, PROMPTS, max_new_tokens=12, seed=seed) for seed in (4, 4, 5)]
    assert texts[0] == texts[1] != texts[2]


def test_sampled_text_does_not_depend_on_the_other_prompts():
    model = build_small(SMALL)
    together = generate(model, PROMPTS, max_new_tokens=12, seed=9)
    assert generate(model, PROMPTS[:1], max_new_tokens=12, seed=9) == together[:1]
    assert generate(model, PROMPTS[2:], max_new_tokens=12, seed=11) == together[2:]


def test_ids_beyond_the_tokenizers_are_never_drawn():
    model = build_small(SMALL)
    options = {"max_new_tokens": 40, "temperature": 5.0, "seed": 4}
    (free,), (known,) = generate(model, [[1, 2]], **options), generate(model, [[1, 2]], num_known_tokens=20, **options)
    assert max(free) >= 20 and max(known) < 20


def test_text_ends_before_the_stop_token():
    model = build_small(SMALL)
    free = generate(model, PROMPTS, max_new_tokens=15, seed=2)
    stop = free[0][6]
    stopped = generate(model, PROMPTS, max_new_tokens=15, seed=2, stop_token=stop)
    assert stopped == [text[: text.index(stop)] if stop in text else text for text in free]


def test_padding_precedes_prompts_and_begins_no_document():
    ids_BT, start_BT = pad_left([[5, 6, 7], [9]])
    assert ids_BT.tolist() == [[5, 6, 7], [0, 0, 9]]
    assert start_BT.tolist() == [[True, False, False], [False, False, True]]


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
    generator = torch.Generator().manual_seed(0)
    tokens = sample(chances.log().expand(20000, 4), [generator] * 20000)
    counts = torch.bincount(tokens, minlength=4) / 20000
    assert ((counts - chances).abs() <= 4 * (chances * (1 - chances) / 20000).sqrt()).all()


WRONG = [
    (dict(max_new_tokens=0), "max_new_tokens=0 must be at least 1; use a positive number"),
    (dict(temperature=-1.0), "temperature=-1.0 must be at least 0; use 0 for the likeliest token"),
    (dict(top_k=-2), "top_k=-2 must be at least 0; use 0 for all tokens"),
    (dict(top_p=0.0), "top_p=0.0 must be above 0 and at most 1; use 1 for all tokens"),
]


@pytest.mark.parametrize(("setting", "message"), WRONG)
def test_setting_out_of_range_is_refused(setting, message):
    with pytest.raises(ValueError) as caught:
        generate(build_small(SMALL), [PROMPT], **{"max_new_tokens": 4, **setting})
    assert str(caught.value) == message


def test_prompt_without_tokens_or_with_unknown_ids_is_refused():
    model = build_small(SMALL)
    with pytest.raises(ValueError, match="must hold at least one token each"):
        generate(model, [PROMPT, []], max_new_tokens=1)
    with pytest.raises(ValueError, match=r"^token id 61 must be below model\.vocab_size=61"):
        generate(model, [[1, 61]], max_new_tokens=1)
