"""Gated DeltaNet, linear attention and softmax attention against their formulas, written out from the mixers' own
weights, in fp64."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from prism_lm.model.operators import build_plain_operators
from prism_lm.model.scan import ScanRunner, build_pure_writes
from tests.prism_lm.model.builders import SMALL, build_rows, build_small, relative_error

TOKENS = 29
WIDE = replace(SMALL, num_layers=1, value_width=32)


def _build_mixer(name: str):
    return build_small(replace(WIDE, mixer=name)).blocks[0].mixer


def _inputs():
    generator = torch.Generator().manual_seed(6)
    x_BTD = torch.randn(2, TOKENS, SMALL.model_width, dtype=torch.float64, generator=generator)
    return x_BTD, build_rows(2, TOKENS, starts=((0, 10), (1, 17), (1, 18)))[1]


def _documents(start_T):
    """Ranges of tokens, one a document."""
    firsts = [*start_T.nonzero().flatten().tolist(), len(start_T)]
    return [slice(first, last) for first, last in itertools.pairwise(firsts)]


def _convolve(weight_DW, x_TD):
    padded = functional.pad(x_TD.T, (weight_DW.shape[1] - 1, 0))
    return functional.silu(functional.conv1d(padded, weight_DW[:, None], groups=len(weight_DW))).T


def _run_gated_delta(mixer, x_TD):
    """One document from a zero state: S = alpha S (I - b k k^T) + b v k^T, o = S q / sqrt(K)."""
    mixed = _convolve(mixer.conv.weight, mixer.query_key_value(x_TD)).split(mixer.widths, dim=-1)
    query, key, value = (part.unflatten(-1, (2, -1)) for part in mixed)
    query, key = functional.normalize(query, dim=-1, eps=0), functional.normalize(key, dim=-1, eps=0)
    step_TH, decay_TH = mixer.step_and_decay(x_TD).chunk(2, dim=-1)
    b_TH = torch.sigmoid(step_TH)
    rate_TH = functional.softplus(decay_TH + mixer.decay.dt_bias)
    alpha_TH = (-mixer.decay.A_log.exp() * rate_TH).exp()
    state_HVK, outputs = x_TD.new_zeros(2, 32, 16), []
    for t in range(len(x_TD)):
        kept_HVK = alpha_TH[t, :, None, None] * state_HVK
        written_HV = b_TH[t, :, None] * (value[t] - torch.einsum("hvk,hk->hv", kept_HVK, key[t]))
        state_HVK = kept_HVK + written_HV[:, :, None] * key[t][:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", state_HVK, query[t]) / 4)
    normed = functional.rms_norm(torch.stack(outputs), (32,), mixer.norm.weight, WIDE.norm_eps)
    return mixer.output(normed.flatten(-2) * functional.silu(mixer.gate(x_TD)))


def _run_linear_attention(mixer, x_TD):
    """One document: S = S + v k^T, o = S q / sqrt(K), token by token."""
    mixed = _convolve(mixer.conv.weight, mixer.query_key_value(x_TD)).split(mixer.widths, dim=-1)
    query, key, value = (part.unflatten(-1, (2, -1)) for part in mixed)
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    state_HVK, outputs = x_TD.new_zeros(2, 32, 16), []
    for t in range(len(x_TD)):
        state_HVK = state_HVK + value[t][:, :, None] * key[t][:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", state_HVK, query[t]) / 4)
    normed = functional.rms_norm(torch.stack(outputs), (32,), mixer.norm.weight, WIDE.norm_eps)
    return mixer.output(normed.flatten(-2) * functional.silu(mixer.gate(x_TD)))


def _turn(vector_THK):
    """Rotary positions 0.. as complex phases."""
    frequency = WIDE.rope_theta ** (-torch.arange(8, dtype=torch.float64) / 8)
    angle = torch.arange(len(vector_THK))[:, None, None] * frequency
    turned = torch.complex(vector_THK[..., :8], vector_THK[..., 8:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def _run_attention(mixer, x_TD):
    """One document alone: causal softmax attention, scores over sqrt(K)."""
    parts = mixer.query_key_value(x_TD).split(mixer.widths, dim=-1)
    query, key, value = (part.unflatten(-1, (2, -1)) for part in parts)
    scores_HTT = torch.einsum("thk,shk->hts", _turn(query), _turn(key)) / 4
    later = torch.ones(len(x_TD), len(x_TD), dtype=torch.bool).triu(1)
    weights_HTT = scores_HTT.masked_fill(later, -torch.inf).softmax(-1)
    return mixer.output(torch.einsum("hts,shv->thv", weights_HTT, value).flatten(-2))


FORMULAS = {"gated_delta": _run_gated_delta, "linear_attention": _run_linear_attention, "attention": _run_attention}


@pytest.mark.parametrize(("name", "formula"), FORMULAS.items())
@torch.no_grad()
def test_mixer_equals_its_formula_on_each_document_alone(name, formula):
    """Gated DeltaNet within 1e-5, for the 1e-6 beside a key's squared norm."""
    mixer, (x_BTD, start_BT) = _build_mixer(name), _inputs()
    out_BTD, _ = mixer(x_BTD, start_BT, None)
    for row in range(2):
        expected_TD = torch.cat([formula(mixer, x_BTD[row, span]) for span in _documents(start_BT[row])])
        assert relative_error(out_BTD[row], expected_TD) < (1e-5 if name == "gated_delta" else 1e-12)


@pytest.mark.parametrize("name", FORMULAS)
@torch.no_grad()
def test_row_cut_anywhere_equals_whole_row(name):
    mixer, (x_BTD, start_BT) = _build_mixer(name), _inputs()
    whole_BTD, whole_state = mixer(x_BTD, start_BT, None)
    state, parts = None, []
    for first, last in [(0, 9), *((token, token + 1) for token in range(9, 12)), (12, TOKENS)]:
        part, state = mixer(x_BTD[:, first:last], start_BT[:, first:last], state)
        parts.append(part)
    assert relative_error(torch.cat(parts, 1), whole_BTD) < 1e-12
    assert all(torch.allclose(left, right, atol=1e-12) for left, right in zip(state, whole_state, strict=True))


def _collect_linear_attention(chunk_tokens, tokens, run=None):
    """The output and the gradients of the input and of every parameter."""
    mixer = build_small(replace(WIDE, mixer="linear_attention", chunk_tokens=chunk_tokens)).blocks[0].mixer
    x_TD = torch.randn(tokens, SMALL.model_width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x_TD.requires_grad_()
    out_TD = mixer(x_TD[None], None, None)[0][0] if run is None else run(mixer, x_TD)
    return [out_TD, *torch.autograd.grad(out_TD.sin().sum(), [x_TD, *mixer.parameters()])]


@pytest.mark.parametrize(("chunk_tokens", "tokens"), [(16, 1), (16, 16), (16, 37), (32, 37), (64, 64)])
def test_linear_attention_has_the_token_loops_outputs_and_gradients_whatever_the_chunk(chunk_tokens, tokens):
    expected = _collect_linear_attention(chunk_tokens, tokens, _run_linear_attention)
    actual = _collect_linear_attention(chunk_tokens, tokens)
    assert max(relative_error(one, other) for one, other in zip(actual, expected, strict=True)) < 1e-12


def test_pure_writes_add_up_without_a_rounding_of_decay_or_forgetting():
    """Integers in fp32: the state is their exact sum."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randint(-3, 4, (2, 70, 2, 16), generator=generator).float() for _ in range(3))
    run_scan = ScanRunner(build_plain_operators(), activation="identity", chunk_tokens=16)
    _, state_BHVK = run_scan(build_pure_writes(query, key, value), None, None)
    assert torch.equal(state_BHVK, torch.einsum("bthv,bthk->bhvk", value, key))


@torch.no_grad()
def test_attention_without_starts_reads_one_document():
    mixer, (x_BTD, _) = _build_mixer("attention"), _inputs()
    start_BT = build_rows(2, TOKENS)[1]
    assert relative_error(mixer(x_BTD, None, None)[0], mixer(x_BTD, start_BT, None)[0]) < 1e-12


@pytest.mark.parametrize("name", FORMULAS)
def test_gradient_reaches_every_parameter(name):
    mixer, (x_BTD, start_BT) = _build_mixer(name), _inputs()
    mixer(x_BTD, start_BT, None)[0].square().sum().backward()
    without = [key for key, parameter in mixer.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert not without
