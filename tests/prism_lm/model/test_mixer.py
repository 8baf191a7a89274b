"""The mixer against the paper's formulas, written out token by token from the mixer's own weights, in fp64."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from kernels.prism.reference import prism_scan_reference
from prism_lm.model.config import projection_widths
from prism_lm.model.decode_state import RecurrentState
from prism_lm.model.mixer import PrismMixer
from tests.prism_lm.model.builders import SMALL, SWITCHES, build_rows, build_small, relative_error

CONFIGS = {"two_steps": SMALL, **SWITCHES}
TOKENS = 37


def _build_mixer(config) -> PrismMixer:
    return build_small(replace(config, num_layers=1)).blocks[0].mixer


def _inputs(batch: int = 2, tokens: int = TOKENS):
    generator = torch.Generator().manual_seed(5)
    x_BTD = torch.randn(batch, tokens, SMALL.model_width, dtype=torch.float64, generator=generator)
    return x_BTD, build_rows(batch, tokens, starts=((0, 11), (1, 12), (1, 13)))[1]


def _project(config, mixer, name: str, u, step: int | None = None):
    """What the mixer's matrix gives under that name, by its rows; with a step, that projection of the solver's."""
    widths = projection_widths(config)
    rows = dict(zip(widths, mixer.projection.weight.split(list(widths.values())), strict=True))[name]
    if step is None:
        return rows @ u
    solver = getattr(mixer, name)
    inner = (rows @ u).chunk(solver.count)[step]
    return inner if solver.up is None else solver.up[step].weight @ inner


def _compute_anchor(mixer, recent_WD):
    """u of the last of `recent_WD`, the tokens of one document so far."""
    if mixer.anchor is None:
        return recent_WD[-1]
    weight_DW = mixer.anchor.weight
    recent_WD = recent_WD[-weight_DW.shape[1] :]
    return functional.silu((weight_DW[:, -len(recent_WD) :] * recent_WD.T).sum(1))


def _compute_alpha(config, mixer, u):
    logit_H, decay = _project(config, mixer, "decay", u), mixer.decay
    if config.decay == "sigmoid":
        return torch.sigmoid(logit_H)
    return (-decay.A_log.exp() * functional.softplus(logit_H + decay.dt_bias)).exp()


def _compute_writes(config, mixer, u):
    """Keys and values of the L pairs, before the step sizes: lists of (H, K) and (H, V)."""
    cut = (config.num_heads, -1)
    keys = [_project(config, mixer, "first_key", u)]
    keys += [_project(config, mixer, "extra_keys", u, step) for step in range(config.write_steps - 1)]
    keys = [functional.normalize(key.view(cut), dim=-1, eps=0) for key in keys]
    value = _project(config, mixer, "value", u).view(cut)
    if config.solver_steps == 0:
        return keys, [value]
    is_wider = config.num_heads * config.value_width != config.model_width
    residual = value - (_project(config, mixer, "anchor", u) if is_wider else u).view(cut)
    writes = []
    for step in range(config.solver_steps):
        gain = _project(config, mixer, "gains", u, step).view(cut) if config.gain == "learned" else 1.0
        write = gain * residual
        writes.append(functional.gelu(write) if config.solver_activation == "gelu" else write)
        residual = residual - writes[-1]
    return keys, writes


def _advance(config, mixer, u, state_HVK):
    keys, writes = _compute_writes(config, mixer, u)
    b_MH = torch.sigmoid(_project(config, mixer, "step_sizes", u)).view(config.write_steps, config.num_heads)
    forget_HKK = torch.eye(config.key_width) - b_MH[0, :, None, None] * keys[0][:, :, None] * keys[0][:, None, :]
    state_HVK = _compute_alpha(config, mixer, u)[:, None, None] * state_HVK @ forget_HKK
    for step, (key, write) in enumerate(zip(keys, writes, strict=True)):
        state_HVK = state_HVK + b_MH[step, :, None, None] * write[:, :, None] * key[:, None, :]
    return state_HVK


def _read(config, mixer, x, u, state_HVK):
    query_HK = _project(config, mixer, "query", u).view(config.num_heads, -1)
    out_HV = (state_HVK @ query_HK[:, :, None])[..., 0] * config.key_width**-0.5
    normed_HV = functional.rms_norm(out_HV, (config.value_width,), mixer.norm.weight, config.norm_eps)
    return mixer.output.weight @ (normed_HV.flatten() * functional.silu(mixer.gate.weight @ x))


def _run_formulas(config, mixer, x_TD, start_T):
    """The outputs of one row and the state after it."""
    state_HVK, first, outputs = None, 0, []
    for token in range(len(x_TD)):
        if start_T[token]:
            state_HVK, first = x_TD.new_zeros(config.num_heads, config.value_width, config.key_width), token
        u = _compute_anchor(mixer, x_TD[first : token + 1])
        state_HVK = _advance(config, mixer, u, state_HVK)
        outputs.append(_read(config, mixer, x_TD[token], u, state_HVK))
    return torch.stack(outputs), state_HVK


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_mixer_equals_the_papers_formulas(name):
    """Within 1e-5: keys are normalised with 1e-6 beside their squared norm, which is about 5."""
    mixer, (x_BTD, start_BT) = _build_mixer(CONFIGS[name]), _inputs()
    out_BTD, state = mixer(x_BTD, start_BT, None)
    for row in range(2):
        expected_TD, expected_HVK = _run_formulas(CONFIGS[name], mixer, x_BTD[row], start_BT[row])
        assert relative_error(out_BTD[row], expected_TD) < 1e-5
        assert relative_error(state.state_BHVK[row], expected_HVK) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_row_cut_anywhere_equals_whole_row(name):
    """Cut in a prefill, single steps and a rest, across a document start."""
    mixer, (x_BTD, start_BT) = _build_mixer(CONFIGS[name]), _inputs()
    whole_BTD, whole_state = mixer(x_BTD, start_BT, None)
    state, parts = None, []
    for first, last in [(0, 9), *((token, token + 1) for token in range(9, 15)), (15, TOKENS)]:
        part, state = mixer(x_BTD[:, first:last], start_BT[:, first:last], state)
        parts.append(part)
    assert relative_error(torch.cat(parts, 1), whole_BTD) < 1e-12
    for left, right in zip(state, whole_state, strict=True):
        assert left is right is None or torch.allclose(left, right, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_reaches_every_parameter(name):
    mixer, (x_BTD, start_BT) = _build_mixer(CONFIGS[name]), _inputs()
    mixer(x_BTD, start_BT, None)[0].square().sum().backward()
    without = [key for key, parameter in mixer.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert not without


def test_no_solver_holds_no_solver_weights():
    names = {name.split(".")[0] for name, _ in _build_mixer(replace(SMALL, solver_steps=0)).named_parameters()}
    assert names == {"anchor", "projection", "decay", "gate", "norm", "output"}


def test_any_scan_of_the_same_signature_serves():
    mixer, (x_BTD, start_BT) = _build_mixer(SMALL), _inputs()
    chunked_BTD, _ = mixer(x_BTD, start_BT, None)
    mixer.run_scan.scan = prism_scan_reference
    assert relative_error(mixer(x_BTD, start_BT, None)[0], chunked_BTD) < 1e-12


@pytest.mark.parametrize("decay", ["gated_delta", "sigmoid"])
def test_decay_of_a_bf16_model_is_fp32(decay):
    mixer = _build_mixer(replace(SMALL, decay=decay)).to(torch.bfloat16)
    log_decay_BTH = mixer.decay(_inputs()[0][..., : SMALL.num_heads].to(torch.bfloat16))
    assert log_decay_BTH.dtype == torch.float32 and log_decay_BTH.max() <= 0


def test_step_sizes_of_a_bf16_model_are_not_rounded_to_one():
    """In bf16 the sigmoid of 7 is 1: a write that forgets all it overwrites, with no gradient back."""
    step_sizes = _build_mixer(SMALL).to(torch.bfloat16).step_sizes
    step_size_BTMH = step_sizes(torch.full((1, 1, 2 * SMALL.num_heads), 7, dtype=torch.bfloat16))
    assert step_size_BTMH.dtype == torch.float32 and step_size_BTMH.max() < 1
    assert torch.allclose(step_size_BTMH, torch.tensor(7.0).sigmoid(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("decay", ["gated_delta", "sigmoid"])
def test_log_decay_is_finite_for_the_largest_projections_of_its_dtype(decay, dtype):
    """The scan takes differences of log decays; an infinite one would be NaN in all that follows."""
    layer, largest = _build_mixer(replace(SMALL, decay=decay)).decay.to(dtype), torch.finfo(dtype).max
    logits = torch.tensor([[largest, -largest], [torch.inf, -torch.inf], [0.0, 1e4]], dtype=dtype, requires_grad=True)
    log_decay = layer(logits)
    log_decay.sum().backward()
    assert log_decay.isfinite().all() and log_decay.max() <= 0 and logits.grad.isfinite().all()


@pytest.mark.parametrize("decay", ["gated_delta", "sigmoid"])
def test_bound_on_the_log_decay_changes_no_alpha(decay):
    """Down to alphas that fp64 can hold, the least of which is above e^-746."""
    layer = _build_mixer(replace(SMALL, decay=decay)).decay
    logits = torch.linspace(-2000, 2000, 4001, dtype=torch.float64)[:, None].expand(-1, SMALL.num_heads)
    if decay == "sigmoid":
        expected = functional.logsigmoid(logits)
    else:
        expected = -layer.A_log.exp() * functional.softplus(logits + layer.dt_bias)
    assert torch.equal(layer(logits).exp(), expected.exp())


def test_state_carries_no_gradient():
    x_BTD, start_BT = _inputs()
    _, state = _build_mixer(SMALL)(x_BTD, start_BT, None)
    assert isinstance(state, RecurrentState) and not any(tensor.requires_grad for tensor in state)
