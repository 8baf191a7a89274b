"""The TTT-MLP against the paper's definition with torch's own gradients of the inner loss, in fp64."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from prism_lm.model.ttt import InnerNorm, InnerWeights, apply_inner, compute_gelu_slope, take_inner_step
from tests.prism_lm.model.builders import SMALL, build_rows, build_small, relative_error

TOKENS, HEADS, WIDTH = 13, 2, 16
INNER = 4 * WIDTH
STARTS = ((0, 5), (1, 8), (1, 9))
CONFIG = replace(SMALL, num_layers=1, mixer="ttt")


def build_mixer():
    """The norm's weight and bias away from 1 and 0, so that they show."""
    mixer = build_small(CONFIG).blocks[0].mixer
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for vector in (mixer.inner.norm_weight, mixer.inner.norm_bias):
            vector.add_(0.3 * torch.randn(vector.shape, dtype=torch.float64, generator=generator))
    return mixer


def build_inputs():
    generator = torch.Generator().manual_seed(6)
    x_BTD = torch.randn(2, TOKENS, SMALL.model_width, dtype=torch.float64, generator=generator)
    return x_BTD, build_rows(2, TOKENS, starts=STARTS)[1]


def read_inner(x, first, second, weight, bias):
    """f(x; W) of one head."""
    normed = functional.layer_norm(second @ functional.gelu(first @ x), (WIDTH,), weight, bias, CONFIG.norm_eps)
    return x + normed


def convolve(weight_DW, x_TD):
    padded = functional.pad(x_TD.T, (weight_DW.shape[1] - 1, 0))
    return functional.silu(functional.conv1d(padded, weight_DW[:, None], groups=len(weight_DW))).T


def run_document(mixer, x_TD):
    """One document, head by head; the inner gradients are torch's, with a graph of their own."""
    query, key, value = convolve(mixer.conv.weight, mixer.query_key_value(x_TD)).chunk(3, dim=-1)
    step_TH = torch.sigmoid(mixer.step(x_TD)) * 0.1 / WIDTH
    heads = []
    for head in range(HEADS):
        own = slice(head * WIDTH, (head + 1) * WIDTH)
        first = mixer.inner.first_weight[head * INNER : (head + 1) * INNER]
        second, weight, bias = (
            parameter[own] for parameter in (mixer.inner.second_weight, mixer.inner.norm_weight, mixer.inner.norm_bias)
        )
        outputs = []
        for t in range(len(x_TD)):
            loss = (read_inner(key[t, own], first, second, weight, bias) - value[t, own]).square().sum()
            grads = torch.autograd.grad(loss, (first, second), create_graph=True)
            first, second = (old - step_TH[t, head] * grad for old, grad in zip((first, second), grads, strict=True))
            outputs.append(read_inner(query[t, own], first, second, weight, bias))
        heads.append(torch.stack(outputs))
    normed = functional.rms_norm(torch.stack(heads, 1), (WIDTH,), mixer.norm.weight, CONFIG.norm_eps)
    return mixer.output(normed.flatten(-2) * functional.silu(mixer.gate(x_TD)))


def run_definition(mixer, x_BTD, start_BT):
    rows = []
    for x_TD, start_T in zip(x_BTD, start_BT, strict=True):
        firsts = [*start_T.nonzero().flatten().tolist(), len(start_T)]
        spans = itertools.pairwise(firsts)
        rows.append(torch.cat([run_document(mixer, x_TD[first:last]) for first, last in spans]))
    return torch.stack(rows)


def collect_grads(mixer, x_BTD, run):
    """The output, then the gradients of the input and of every parameter."""
    x_BTD = x_BTD.clone().requires_grad_()
    out_BTD = run(x_BTD)
    names = ["x", *(name for name, _ in mixer.named_parameters())]
    grads = torch.autograd.grad(out_BTD.sin().sum(), [x_BTD, *mixer.parameters()])
    return {"out": out_BTD, **dict(zip(names, grads, strict=True))}


def test_output_and_every_gradient_equal_those_of_nested_autograd_on_each_document_alone():
    mixer, (x_BTD, start_BT) = build_mixer(), build_inputs()
    expected = collect_grads(mixer, x_BTD, lambda x: run_definition(mixer, x, start_BT))
    actual = collect_grads(mixer, x_BTD, lambda x: mixer(x, start_BT, None)[0])
    assert {name: relative_error(actual[name], tensor) for name, tensor in expected.items()} == pytest.approx(
        dict.fromkeys(expected, 0.0), abs=1e-11
    )


def test_first_weights_learn_through_every_step():
    """With the steps cut off from what is differentiated, their gradient is another one."""
    mixer, (x_BTD, _) = build_mixer(), build_inputs()
    whole = collect_grads(mixer, x_BTD, lambda x: mixer(x, None, None)[0])["inner.first_weight"]
    last = collect_grads(mixer, x_BTD, lambda x: mixer(x, torch.ones(2, TOKENS, dtype=torch.bool), None)[0])
    assert relative_error(last["inner.first_weight"], whole) > 0.05


def build_inner():
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    weights = InnerWeights(draw(3, INNER, WIDTH) / 4, draw(3, WIDTH, INNER) / 8)
    return weights, InnerNorm(1 + draw(3, WIDTH) / 4, draw(3, WIDTH) / 4, 1e-5), draw(3, WIDTH), draw(3, WIDTH)


def test_written_gradient_equals_autograds():
    weights, norm, key_GK, value_GV = build_inner()
    leaves = InnerWeights(*(tensor.requires_grad_() for tensor in weights))
    loss = (apply_inner(leaves, norm, key_GK) - value_GV).square().sum()
    step_G1 = torch.tensor([[1.0], [0.5], [0.0]], dtype=torch.float64)
    moved = take_inner_step(weights, norm, key_GK, value_GV, step_G1)
    for before, after, grad in zip(weights, moved, torch.autograd.grad(loss, leaves), strict=True):
        assert relative_error((before - after)[:2], step_G1[:2, :, None] * grad[:2]) < 1e-13
        assert torch.equal(before[2], after[2])


def test_gelu_slope_is_the_derivative_of_gelu():
    x = torch.linspace(-6, 6, 101, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(functional.gelu(x).sum(), x)
    assert torch.allclose(compute_gelu_slope(x), expected, atol=1e-14)


@torch.no_grad()
def test_a_small_step_lowers_the_loss_of_its_token():
    weights, norm, key_GK, value_GV = build_inner()
    losses = []
    for step in (0.0, 0.1 / WIDTH):
        moved = take_inner_step(weights, norm, key_GK, value_GV, torch.full((3, 1), step, dtype=torch.float64))
        losses.append((apply_inner(moved, norm, key_GK) - value_GV).square().sum(-1))
    assert (losses[1] < losses[0]).all()


@torch.no_grad()
def test_row_cut_anywhere_equals_whole_row():
    mixer, (x_BTD, start_BT) = build_mixer(), build_inputs()
    whole_BTD, whole_state = mixer(x_BTD, start_BT, None)
    state, parts = None, []
    for first, last in [(0, 4), *((token, token + 1) for token in range(4, 7)), (7, TOKENS)]:
        part, state = mixer(x_BTD[:, first:last], start_BT[:, first:last], state)
        parts.append(part)
    assert relative_error(torch.cat(parts, 1), whole_BTD) < 1e-13
    assert all(torch.allclose(left, right, atol=1e-13) for left, right in zip(state, whole_state, strict=True))


@torch.no_grad()
def test_row_without_starts_is_one_document():
    mixer, (x_BTD, _) = build_mixer(), build_inputs()
    assert relative_error(mixer(x_BTD, None, None)[0], mixer(x_BTD, build_rows(2, TOKENS)[1], None)[0]) < 1e-13


@torch.no_grad()
def test_state_carries_fp32_weights_in_a_bf16_model():
    mixer = build_small(CONFIG, dtype=torch.bfloat16).blocks[0].mixer
    out_BTD, state = mixer(torch.ones(1, 3, SMALL.model_width, dtype=torch.bfloat16), None, None)
    assert (out_BTD.dtype, state.first_BHFK.dtype, state.second_BHVF.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    assert state.first_BHFK.shape == (1, HEADS, INNER, WIDTH) and state.second_BHVF.shape == (1, HEADS, WIDTH, INNER)
