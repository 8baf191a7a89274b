"""The coordinate check of plan.transfer_rate: how much updates change activations, over widths 64 to 256.

Stated factors, over fourfold widths at exponent 1: what six updates add to the residual stream and to the logits
differs by at most 3 and 1.5 between widths, and does not grow. At exponent 0, one rate for all widths, it grows.
"""

import functools

import pytest
import torch

from prism_lm.model.config import ModelConfig
from prism_lm.model.lm import LanguageModel, build_model
from prism_lm.scaling.plan import Base, SizeRule, build_size, transfer_rate
from prism_lm.train.optim import OptimConfig, build_adamw

RULE = SizeRule(head_width=32, layers_per_head=0, min_layers=2, mlp_ratio=8 / 3, solver_fraction=1 / 6)
TINY = ModelConfig(vocab_size=256, chunk_tokens=16, model_width=192)
BASE = Base(model=TINY, learning_rate=4e-3, row_tokens=32, batch_rows=4)
FAMILIES = ["prism", "gated_delta", "attention"]
NARROW, WIDE, STEPS = 64, 256, 6


@functools.cache
def measure(family: str, width: int, exponent: float) -> dict[str, float]:
    """RMS of the residual stream and of the logits at the start, and of their change after six updates."""
    torch.manual_seed(0)
    model = build_model(build_size(RULE, TINY, width // RULE.head_width, family), seed=0)
    optimizer = build_adamw(model, OptimConfig(learning_rate=transfer_rate(BASE, width, exponent)))
    frequency = 1 / torch.arange(1, TINY.vocab_size + 1.0)
    drawn = torch.multinomial(frequency.expand((STEPS + 1) * 4, -1), BASE.row_tokens + 1, replacement=True)
    *batches, looked_at = drawn.view(STEPS + 1, 4, -1)
    before = read_coordinates(model, looked_at[:, :-1])
    for tokens in batches:
        (model(tokens[:, :-1], None, tokens[:, 1:]) / tokens[:, 1:].numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = read_coordinates(model, looked_at[:, :-1])
    changes = {f"{name}_change": compute_rms(after[name] - before[name]) for name in before}
    return {name: compute_rms(value) for name, value in before.items()} | changes


@torch.no_grad()
def read_coordinates(model: LanguageModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    stream = model.embedding(tokens) * model.embedding_scale
    for block in model.blocks:
        stream = block(stream, None, None)[0]
    return {"stream": stream, "logits": model.head(model.final_norm(stream))}


def compute_rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_start_as_large_at_every_width(family):
    narrow, wide = measure(family, NARROW, 1.0), measure(family, WIDE, 1.0)
    for name in ("stream", "logits"):
        assert 1 / 1.5 < wide[name] / narrow[name] < 1.5


@pytest.mark.parametrize("family", FAMILIES)
def test_updates_at_the_transferred_rate_stay_within_the_stated_factors_and_do_not_grow(family):
    narrow, wide = measure(family, NARROW, 1.0), measure(family, WIDE, 1.0)
    assert 1 / 3 < wide["stream_change"] / narrow["stream_change"] < 1.2
    assert 1 / 1.5 < wide["logits_change"] / narrow["logits_change"] < 1.2


@pytest.mark.parametrize("family", FAMILIES)
def test_updates_at_one_rate_for_all_widths_grow_in_the_residual_stream(family):
    narrow, wide = measure(family, NARROW, 0.0), measure(family, WIDE, 0.0)
    assert wide["stream_change"] / narrow["stream_change"] > 1.5
