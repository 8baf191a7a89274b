"""Captured steps against the eager loop. On the CPU a capture is the step itself, called again; a CUDA graph needs a
GPU."""

from dataclasses import replace

import pytest
import torch

from prism_lm.model.decode_graph import GraphDecoder, build_decoder, can_be_captured
from prism_lm.model.decoder import EagerDecoder
from prism_lm.model.generate import generate
from prism_lm.model.kernels import select_operators
from prism_lm.model.lm import LanguageModel, build_model
from prism_lm.model.sampling import BLOCK_NUMBERS
from tests.prism_lm.model.builders import FAMILIES, SMALL, build_small

PROMPTS = [[1, 7, 7, 30, 12, 45, 2], [1], [1, *range(10, 34)], [1, 5], [1, 44, 3]]
MODELS = {
    **{f"L={steps}": replace(SMALL, solver_steps=steps) for steps in (0, 1, 2, 4)},
    "gated_delta": FAMILIES["gated_delta"],
    "linear_attention": FAMILIES["linear_attention"],
    "no_anchor": replace(SMALL, anchor="none"),
}
GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9}


def repeat_step(step):
    """A capture without a graph: it warms up as one does."""
    step()
    step()
    return step


def build_pretended(model: LanguageModel, *, lag_tokens: int = 3) -> GraphDecoder:
    decoder = GraphDecoder(model, capture=repeat_step)
    decoder.lag_tokens = lag_tokens
    return decoder


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", MODELS)
def test_captured_steps_give_the_eager_tokens(name, options, rows):
    model = build_small(MODELS[name])
    options = {"max_new_tokens": 20, "seed": 3, **options}
    expected = generate(model, PROMPTS[:rows], **options)
    assert generate(model, PROMPTS[:rows], decoder=build_pretended(model), **options) == expected


def test_one_decoder_serves_other_prompts_numbers_of_them_and_settings():
    model, capture_s = build_small(SMALL), []
    decoder = build_pretended(model)
    decoder.on_capture = capture_s.append
    cases = [
        (PROMPTS[:2], SAMPLED),
        (PROMPTS[2:4], SAMPLED),
        (PROMPTS, SAMPLED),
        (PROMPTS, GREEDY),
        (PROMPTS[:2], SAMPLED),
    ]
    captures = []
    for seed, (prompts, options) in enumerate(cases):
        expected = generate(model, prompts, max_new_tokens=9, seed=seed, **options)
        assert generate(model, prompts, max_new_tokens=9, seed=seed, decoder=decoder, **options) == expected
        captures.append(decoder.num_captures)
    assert captures == [1, 1, 2, 3, 4] and len(capture_s) == 4 and min(capture_s) > 0


def test_text_longer_than_a_block_of_numbers_goes_on_with_the_next():
    model = build_small(replace(SMALL, num_layers=1, solver_steps=0), dtype=torch.float32)
    options = {"max_new_tokens": BLOCK_NUMBERS + 30, "seed": 5}
    expected = generate(model, PROMPTS[:2], **options)
    assert generate(model, PROMPTS[:2], decoder=build_pretended(model), **options) == expected


@pytest.mark.parametrize("lag_tokens", [0, 1, 5, 100])
def test_tokens_taken_beyond_the_end_are_dropped(lag_tokens):
    model = build_small(SMALL)
    free = generate(model, PROMPTS, max_new_tokens=15, seed=2)
    options = {"max_new_tokens": 15, "seed": 2, "stop_token": free[0][6]}
    expected = generate(model, PROMPTS, **options)
    handed = [[] for _ in PROMPTS]
    decoder = build_pretended(model, lag_tokens=lag_tokens)
    texts = generate(model, PROMPTS, decoder=decoder, on_tokens=lambda row, new: handed[row].extend(new), **options)
    assert texts == expected == handed and len(texts[0]) < 15


@pytest.mark.parametrize("family", FAMILIES)
def test_model_off_the_gpu_takes_the_eager_loop(family):
    model = build_small(FAMILIES[family])
    assert not can_be_captured(model) and isinstance(build_decoder(model), EagerDecoder)


WIDE = replace(SMALL, model_width=256, num_heads=4, key_width=64, value_width=64, mlp_width=336, solver_rank=32)
ON_GPU = {
    **{f"L={steps}": replace(WIDE, solver_steps=steps) for steps in (0, 1, 2, 4)},
    "gated_delta": replace(WIDE, mixer="gated_delta"),
}


def build_on_gpu(name: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return build_model(ON_GPU[name], seed=3, device="cuda", dtype=dtype, operators=select_operators("cuda")).eval()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", ON_GPU)
def test_cuda_graph_gives_the_eager_tokens(name, rows):
    """In fp32: kernels for one token differ from plain torch's by a rounding, far less than likely tokens do."""
    model = build_on_gpu(name)
    decoder = build_decoder(model)
    assert isinstance(decoder, GraphDecoder)
    for options in (GREEDY, SAMPLED):
        for seed in (1, 2, 3):
            given = {"max_new_tokens": 60, "seed": seed, **options}
            expected = generate(model, PROMPTS[:rows], **given)
            assert generate(model, PROMPTS[:rows], decoder=decoder, **given) == expected
            given["stop_token"] = expected[0][30]
            stopped = generate(model, PROMPTS[:rows], **given)
            assert generate(model, PROMPTS[:rows], decoder=decoder, **given) == stopped
    assert decoder.num_captures == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graph_serves_prompts_of_another_shape(dtype):
    """The same kernels on the same numbers as steps that are not captured, so the same tokens in bf16 too."""
    model = build_on_gpu("L=2", dtype)
    decoder = build_decoder(model)
    for prompts in (PROMPTS[:2], PROMPTS[2:4], PROMPTS, [PROMPTS[2] * 40], PROMPTS[:2]):
        given = {"max_new_tokens": 2 * BLOCK_NUMBERS + 5, "seed": 4}
        expected = generate(model, prompts, decoder=build_pretended(model), **given)
        assert generate(model, prompts, decoder=decoder, **given) == expected


@pytest.mark.gpu
def test_attention_on_the_gpu_takes_the_eager_loop():
    config = replace(WIDE, layer_pattern=["prism", "attention"])
    model = build_model(config, seed=3, device="cuda", operators=select_operators("cuda"))
    assert isinstance(build_decoder(model), EagerDecoder)


@pytest.mark.gpu
def test_replayed_steps_allocate_nothing_and_never_wait_for_the_host():
    """With an error for every synchronisation, which the steps themselves must not need."""
    from prism_lm.model.sampling import Sampling, UniformNumbers

    model = build_on_gpu("L=2")
    decoder = build_decoder(model)
    with torch.no_grad():
        logits_B1V, state = model.logits(torch.tensor([[1, 2, 3]], device="cuda"), last_only=True)
        decoder.start(logits_B1V[:, -1], state, Sampling(**SAMPLED), UniformNumbers([1]))
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(BLOCK_NUMBERS - 2):
                decoder.advance()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == before
