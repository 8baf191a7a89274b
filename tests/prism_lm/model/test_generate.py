from dataclasses import replace

import pytest
import torch

from prism_lm.model.generate import generate
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


def test_row_ends_after_the_token_at_which_the_caller_says_so():
    model, seen = build_small(SMALL), []

    def should_stop(row, tokens):
        seen.append((row, list(tokens)))
        return row == 1 and len(tokens) == 3

    free = generate(model, PROMPTS, max_new_tokens=6, seed=2)
    assert generate(model, PROMPTS, max_new_tokens=6, seed=2, should_stop=should_stop) == [
        free[0],
        free[1][:3],
        free[2],
    ]
    expected = [(row, free[row][:count]) for count in range(1, 7) for row in range(3) if row != 1 or count <= 3]
    assert seen == expected


def test_tokens_are_handed_over_one_by_one_without_the_stop_token():
    model, handed = build_small(SMALL), [[], [], []]
    free = generate(model, PROMPTS, max_new_tokens=9, seed=2)
    options = {"max_new_tokens": 9, "seed": 2, "stop_token": free[0][4]}
    texts = generate(model, PROMPTS, on_tokens=lambda row, tokens: handed[row].extend(tokens), **options)
    assert handed == texts and len(texts[0]) < 9


def test_each_prompt_may_have_a_seed_of_its_own():
    model = build_small(SMALL)
    one_by_one = [generate(model, [PROMPTS[row]], max_new_tokens=8, seed=seed)[0] for row, seed in enumerate([9, 4, 7])]
    assert generate(model, PROMPTS, max_new_tokens=8, seed=[9, 4, 7]) == one_by_one
    with pytest.raises(ValueError, match=r"^seed=\[9, 4\] must be one number, or one for each of 3 prompts"):
        generate(model, PROMPTS, max_new_tokens=8, seed=[9, 4])


WRONG = [
    (dict(max_new_tokens=0), "max_new_tokens=0 must be at least 1; use a positive number"),
    (dict(temperature=float("nan")), "temperature=nan must be at least 0; use 0 for the likeliest token"),
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
