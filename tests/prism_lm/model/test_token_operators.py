"""Steps that write in place, on plain torch and on Triton kernels (interpreted where there is no GPU)."""

from dataclasses import replace

import pytest
import torch

from prism_lm.model.decode_state import DecodeState, RecurrentState
from prism_lm.model.kernels import build_triton_operators
from prism_lm.model.lm import LanguageModel, build_model
from prism_lm.model.operators import Operators, build_plain_operators
from prism_lm.model.token_operators import TokenOperators
from tests.prism_lm.model.builders import SMALL, build_small, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELS = {
    "L=2": SMALL,
    "four_steps": replace(SMALL, solver_steps=4),
    "no_solver": replace(SMALL, solver_steps=0),
    "no_anchor": replace(SMALL, anchor="none"),
    "sigmoid_decay": replace(SMALL, decay="sigmoid", conv_width=3),
    "gated_delta": replace(SMALL, mixer="gated_delta"),
    "linear_attention": replace(SMALL, mixer="linear_attention"),
}
IDS_BT = torch.tensor([[1, 7, 30, 12], [1, 44, 2, 9]], device=DEVICE)


def build(name: str, operators: Operators, dtype: torch.dtype) -> LanguageModel:
    model = build_model(MODELS[name], seed=3, dtype=dtype, device=DEVICE, operators=operators)
    model.load_state_dict(build_small(MODELS[name], dtype=dtype).state_dict())
    return model


def narrow(state: DecodeState, dtype: torch.dtype) -> DecodeState:
    """A contiguous copy of a recurrent state, in another dtype."""
    layers = [
        RecurrentState(
            *(None if x is None else x.to(dtype).clone(memory_format=torch.contiguous_format) for x in layer)
        )
        for layer in state.layers
    ]
    return DecodeState(layers=tuple(layers))


@pytest.mark.parametrize("form", ["plain", "triton"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_steps_give_the_models_logits_and_write_its_state_where_it_lies(name, form):
    """Two steps; fp32 against fp64, with some hundred roundings on the way."""
    operators, dtype = (
        (build_plain_operators(), torch.float64) if form == "plain" else (build_triton_operators(), torch.float32)
    )
    model, exact = build(name, operators, dtype), build(name, build_plain_operators(), torch.float64)
    _, expected = exact.logits(IDS_BT)
    state = narrow(expected, dtype)
    token_operators = TokenOperators(model)
    addresses = [tensor.data_ptr() for layer in state.layers for tensor in layer if tensor is not None]
    for token in (4, 40):
        ids_B1 = torch.tensor([[token], [token + 1]], device=DEVICE)
        expected_B1V, expected = exact.logits(ids_B1, state=expected)
        with token_operators.use():
            logits_B1V, after = model.logits(ids_B1, state=state)
        assert relative_error(logits_B1V.double(), expected_B1V) < (1e-12 if form == "plain" else 2e-6)
        for pair in zip(state.layers, after.layers, strict=True):
            for before, new in zip(*pair, strict=True):
                assert before is new is None or before.data_ptr() == new.data_ptr()
    assert addresses == [tensor.data_ptr() for layer in state.layers for tensor in layer if tensor is not None]
    for kept, other in zip(state.layers, expected.layers, strict=True):
        assert relative_error(kept.state_BHVK.double(), other.state_BHVK) < (1e-12 if form == "plain" else 2e-6)


@pytest.mark.parametrize("build_operators", [build_plain_operators, build_triton_operators])
@torch.no_grad()
def test_model_is_its_own_again_after_the_block(build_operators):
    model = build("L=2", build_operators(), torch.float32)
    _, state = build("L=2", build_plain_operators(), torch.float32).logits(IDS_BT)
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(KeyError), TokenOperators(model).use():
        assert [dict(vars(module)) for module in model.modules()] != before
        raise KeyError
    assert [dict(vars(module)) for module in model.modules()] == before
    kept_BHVK = state.layers[0].state_BHVK.clone()
    model.logits(IDS_BT[:, :1], state=state)
    assert torch.equal(state.layers[0].state_BHVK, kept_BHVK)
