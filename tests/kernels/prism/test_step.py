"""The fused decode step, interpreted on the CPU, against the plain one in fp64."""

import pytest
import torch

from kernels import allocate
from kernels.prism.reference import prism_scan_reference
from kernels.prism.step import prism_step
from kernels.prism.step_reference import prism_step_reference
from tests.kernels.compare import assert_error_at_most_twice
from tests.kernels.prism.cases import Case, build_case

# A sum of K terms in another order errs by some roundings of fp32; the output's own rounding is the reference's too.
FLOOR = 8 * 2**-24


def build_token(L: int, dtype: torch.dtype, K: int, V: int) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """Inputs of one token in `dtype` and a state in fp32."""
    case = build_case(L, 1, K=K, V=V).cast(dtype)
    tensors = [None if x is None else x[:, 0].detach() for x in case.tensors]
    return tensors, case.entry_state.detach().float()


def compare_with_plain(tensors: list[torch.Tensor | None], state: torch.Tensor, activation: str) -> dict[str, tuple]:
    wide = [None if x is None else x.double() for x in tensors]
    truth = prism_step_reference(*wide, activation=activation, state_BHVK=state.double())
    same = prism_step_reference(*tensors, activation=activation, state_BHVK=state)
    actual = prism_step(*tensors, activation=activation, state_BHVK=state)
    return dict(zip(("out", "state"), zip(actual, same, truth, strict=True), strict=True))


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """What a kernel leaves unwritten is NaN."""

    def allocate_nan(*sizes, like, dtype=None):
        return torch.full(sizes, torch.nan, device=like.device, dtype=dtype or like.dtype)

    monkeypatch.setattr(allocate, "allocate", allocate_nan)


@pytest.mark.parametrize("activation", ["gelu", "identity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("L", [0, 1, 2, 3, 4])
def test_step_errs_no_more_than_the_plain_one(L, dtype, activation):
    assert_error_at_most_twice(FLOOR, **compare_with_plain(*build_token(L, dtype, 16, 16), activation))


@pytest.mark.parametrize(("K", "V"), [(48, 48), (16, 48), (48, 16), (64, 32)])
def test_widths_that_are_no_powers_of_two_are_exact_too(K, V):
    assert_error_at_most_twice(FLOOR, **compare_with_plain(*build_token(2, torch.float32, K, V), "gelu"))


def test_inputs_of_several_dtypes_and_strides_are_read_right():
    tensors, state = build_token(2, torch.float16, 16, 16)
    tensors[4:] = [x.float().mT.contiguous().mT for x in tensors[4:]]
    tensors[1] = tensors[1].transpose(1, 2).contiguous().transpose(1, 2)
    assert_error_at_most_twice(FLOOR, **compare_with_plain(tensors, state.mT.contiguous().mT, "gelu"))


@pytest.mark.parametrize("decay", [0.0, -20.0, -2000.0])
def test_any_finite_log_decay_is_exact(decay):
    tensors, state = build_token(2, torch.float32, 16, 16)
    tensors[5] = torch.full_like(tensors[5], decay)
    assert_error_at_most_twice(FLOOR, **compare_with_plain(tensors, state, "gelu"))


@torch.no_grad()
@pytest.mark.parametrize("L", [0, 2])
def test_steps_in_place_equal_the_loop_over_tokens(L):
    case = build_case(L, 12, K=16, V=16, packed=False).cast(torch.float32)
    truth = prism_scan_reference(*Case(case.tensors, None, None).cast(torch.float64).tensors)
    same = prism_scan_reference(*case.tensors)
    state, outputs = torch.zeros(2, 2, 16, 16), []
    for t in range(12):
        token = [None if x is None else x[:, t] for x in case.tensors]
        out, returned = prism_step(*token, state_BHVK=state, out_state_BHVK=state)
        assert returned is state
        outputs.append(out)
    actual = (torch.stack(outputs, 1), state)
    assert_error_at_most_twice(FLOOR, out=(actual[0], same[0], truth[0]), state=(actual[1], same[1], truth[1]))


def test_the_given_state_is_left_alone():
    tensors, state = build_token(2, torch.float32, 16, 16)
    before = state.clone()
    _, new_state = prism_step(*tensors, state_BHVK=state)
    assert torch.equal(state, before) and new_state.data_ptr() != state.data_ptr()


@torch.no_grad()
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_step_is_one_operator_without_graph_breaks(in_place):
    tensors, state = build_token(2, torch.float32, 16, 16)

    def decode(state):
        for _ in range(2):
            out, state = prism_step(*tensors, state_BHVK=state, out_state_BHVK=state if in_place else None)
        return out * 2, state

    expected = decode(state.clone())
    actual = torch.compile(decode, backend="aot_eager", fullgraph=True)(state)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert torch.equal(state, expected[1]) is in_place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.double(), r"state_BHVK.dtype=torch.float64 must be .*prism_step_reference"),
        (lambda x: x.mT[..., :8, :], r"state_BHVK.shape=\(2, 2, 8, 16\) must equal \(B, H, V, K\)"),
        (lambda x: x.requires_grad_(), "state_BHVK.requires_grad=True must be False; call prism_step_"),
        (lambda x: x.to("meta"), "state_BHVK.device=meta must be .* or call prism_step_reference"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(change, message):
    tensors, state = build_token(2, torch.float32, 16, 16)
    with pytest.raises(ValueError, match=message):
        prism_step(*tensors, state_BHVK=change(state))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.half(), "out_state_BHVK.dtype=torch.float16 must equal torch.float32"),
        (lambda state: state.mT, r"out_state_BHVK.stride\(\)=.* must be contiguous"),
        (lambda state: state[:1], r"out_state_BHVK.shape=\(1, 2, 16, 16\) must equal state_BHVK.shape"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_by_name(change, message):
    tensors, state = build_token(2, torch.float32, 16, 16)
    with pytest.raises(ValueError, match=message):
        prism_step(*tensors, state_BHVK=state, out_state_BHVK=change(state))


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (0, lambda x: x[..., :10], r"query_BHK.shape\[2\]=10 must be a multiple of 16 from 16 to 256"),
        (1, lambda x: x[:, :1], r"gain_BLHV.shape=\(2, 2, 2, 16\) must equal \(B, L=M, H, V\)"),
        (3, lambda x: None, r"key_BMHK.shape=\(2, 2, 2, 16\) must equal \(B, 1, H, K\) without gains"),
        (5, lambda x: x.double(), "log_decay_BH.dtype=torch.float64 must be one of"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(position, change, message):
    tensors, state = build_token(2, torch.float32, 16, 16)
    tensors[position] = change(tensors[position])
    if position == 1:
        tensors[4] = tensors[4][:, :1]
    with pytest.raises(ValueError, match=message):
        prism_step(*tensors, state_BHVK=state)
