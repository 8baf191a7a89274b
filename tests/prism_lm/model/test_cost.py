from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from prism_lm.model.config import ModelConfig
from prism_lm.model.cost import (
    count_parameters,
    flops_per_token,
    inner_flops_per_token,
    optimizer_bytes,
    scan_flops_per_token,
    state_bytes,
    training_bytes,
)
from prism_lm.model.lm import LanguageModel
from prism_lm.model.sizes import named_size, size_names
from tests.prism_lm.model.builders import FAMILIES, SMALL, SWITCHES, build_rows, build_small

CONFIGS = {**{name: named_size(name) for name in size_names()}, **FAMILIES, **SWITCHES}


@pytest.mark.parametrize("name", CONFIGS)
def test_counted_parameters_equal_the_built_models(name):
    with torch.device("meta"):
        model = LanguageModel(CONFIGS[name])
    assert count_parameters(CONFIGS[name]) == sum(parameter.numel() for parameter in model.parameters())


def _scan_without_products(query, key, residual, gain, step_size, log_decay, **settings):
    """Passes a gradient to every input and multiplies no matrices."""
    written = key.sum((2, 4)) + step_size.sum(2) + log_decay + query.sum(-1)
    out = residual + written[..., None] + (0 if gain is None else gain.sum(2))
    return out, residual.new_zeros(residual.shape[0], *residual.shape[2:], query.shape[-1])


def _count_batched_product(added, first, second, *, out_shape, beta=1, alpha=1):
    batch, rows, inner = first
    return 2 * batch * rows * inner * second[-1]


def _measure_flops_per_token(config: ModelConfig, tokens: int, scan=None) -> float:
    model = build_small(config, dtype=torch.float32)
    if scan is not None:
        for block in model.blocks:
            block.mixer.run_scan.scan = scan
    ids, _, _ = build_rows(1, tokens)
    in_place = {torch.ops.aten.baddbmm_: _count_batched_product}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:  # does not see into the chunked loss
        model.logits(ids)[0].sum().backward()
    return counter.get_total_flops() / tokens


@pytest.mark.parametrize("name", ["prism", "gated_delta", "linear_attention", *SWITCHES])
def test_flops_outside_the_scan_equal_torchs_count(name):
    """Exact but for the convolution, which torch runs as sums and does not count."""
    config = CONFIGS[name]
    measured = _measure_flops_per_token(config, 64, _scan_without_products)
    scans = sum(scan_flops_per_token(config, mixer, 64) for mixer in config.layer_mixers())
    prism_channels = 32 if config.anchor == "shortconv" else 0
    channels = prism_channels if config.mixer == "prism" else 96
    convolutions = config.num_layers * 6 * config.conv_width * channels
    assert flops_per_token(config, 64) - scans - convolutions == measured


def test_flops_of_ttt_equal_torchs_count():
    """Exact but for the convolution; the outer products of the inner steps are counted as matrix products."""
    config, tokens = FAMILIES["ttt"], 24
    convolutions = config.num_layers * 6 * config.conv_width * 96
    assert flops_per_token(config, tokens) - convolutions == _measure_flops_per_token(config, tokens)
    assert inner_flops_per_token(config) == 42 * 2 * 64 * 16


def test_attention_counts_half_of_the_causal_square():
    """The plain form multiplies the whole square: two products forward, four backward."""
    config, tokens = FAMILIES["attention"], 64
    square = 3 * 4 * tokens * config.num_heads * config.key_width * config.num_layers
    with sdpa_kernel(SDPBackend.MATH):
        measured = _measure_flops_per_token(config, tokens)
    assert flops_per_token(config, tokens) - square // 2 == measured - square


SCANS = {f"L={steps}": dict(solver_steps=steps) for steps in (1, 2, 4)} | {
    "linear_attention": dict(mixer="linear_attention")
}


@pytest.mark.parametrize("name", SCANS)
def test_scan_flops_are_those_of_the_plain_chunk_form_less_its_transitions(name):
    """The plain form shortens its serial loop by each chunk's transition M = gamma_C I - k^T w, with w = T (b gamma k).

    A chunk and head then costs, beside what is counted: w, its product in the reach of the gradients, and a product of
    (k k^T)'s gradient with k for each operand where one would do, 6 C^2 K in all; M in both directions, 4 C K^2; M
    times the state, 4 K^2 V. The state's gradient takes one product with C x K x V less, 2 C K V.
    """
    config = replace(SMALL, key_width=32, value_width=64, chunk_tokens=16, **SCANS[name])
    C, K, V = config.chunk_tokens, config.key_width, config.value_width
    with_scan = _measure_flops_per_token(config, 8 * C)
    measured = with_scan - _measure_flops_per_token(config, 8 * C, _scan_without_products)
    counted = sum(scan_flops_per_token(config, mixer, 8 * C) for mixer in config.layer_mixers())
    transitions = (6 * C**2 * K + 4 * C * K**2 + 4 * K**2 * V - 2 * C * K * V) // C
    assert measured == counted + config.num_layers * config.num_heads * transitions


def test_state_bytes_equal_the_state_after_a_prompt():
    for config in [*FAMILIES.values(), *SWITCHES.values()]:
        model = build_small(config, dtype=torch.float32)
        _, state = model.logits(build_rows(1, 20)[0])
        bookkeeping = sum(8 * 20 + 8 for mixer in config.layer_mixers() if mixer == "attention")
        assert state.num_bytes() - bookkeeping == state_bytes(config, context_tokens=20, element_bytes=4)


@pytest.mark.parametrize(("precision", "optimizer", "training"), [("bf16", 4 + 8, 2 + 4 + 12), ("fp32", 8, 4 + 4 + 8)])
def test_training_keeps_weights_fp32_gradients_and_the_optimizer(precision, optimizer, training):
    """Bytes a parameter: the optimizer keeps two fp32 moments, and fp32 master weights where weights are bf16."""
    parameters = count_parameters(SMALL)
    assert optimizer_bytes(SMALL, precision=precision) == optimizer * parameters
    assert training_bytes(SMALL, precision=precision) == training * parameters
