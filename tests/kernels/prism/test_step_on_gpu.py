"""The fused decode step on a CUDA device: every width and dtype against fp64, CUDA graphs, the same bits every time."""

import pytest
import torch

from kernels.prism.step import prism_step
from kernels.prism.step_reference import prism_step_reference
from tests.kernels.compare import assert_error_at_most_twice
from tests.kernels.prism.cases import build_case

pytestmark = pytest.mark.gpu

FLOOR = 8 * 2**-24


def build_token(L: int, dtype: torch.dtype, **sizes: int) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """Inputs of one token and a state on the GPU; step sizes and log decays in fp32, as the model has them."""
    case = build_case(L, 1, **sizes).cast(torch.float32, "cuda")
    query, key, residual, gain, step_size, log_decay = [None if x is None else x[:, 0].detach() for x in case.tensors]
    tensors = [None if x is None else x.to(dtype) for x in (query, key, residual, gain)]
    return [*tensors, step_size, log_decay], case.entry_state.detach()


def compare_with_plain(tensors: list[torch.Tensor | None], state: torch.Tensor, activation: str) -> None:
    wide = [None if x is None else x.double() for x in tensors]
    truth = prism_step_reference(*wide, activation=activation, state_BHVK=state.double())
    same = prism_step_reference(*tensors, activation=activation, state_BHVK=state)
    actual = prism_step(*tensors, activation=activation, state_BHVK=state)
    triples = zip(("out", "state"), zip(actual, same, truth, strict=True), strict=True)
    assert_error_at_most_twice(FLOOR, **dict(triples))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("L", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("B", [1, 64])
def test_step_of_the_models_heads_errs_no_more_than_the_plain_one(B, L, dtype):
    compare_with_plain(*build_token(L, dtype, B=B, H=16, K=128, V=128), "gelu")


@pytest.mark.parametrize(("K", "V"), [(16, 16), (48, 48), (64, 64), (48, 256), (256, 64), (256, 256), (240, 112)])
@pytest.mark.parametrize("activation", ["gelu", "identity"])
def test_every_width_errs_no_more_than_the_plain_one(K, V, activation):
    compare_with_plain(*build_token(2, torch.bfloat16, B=3, H=5, K=K, V=V), activation)


def test_inputs_at_odd_addresses_are_read_right():
    tensors, state = build_token(2, torch.bfloat16, B=2, H=3, K=64, V=64)
    shifted = []
    for x in (*tensors, state):
        room = x.new_empty(x.numel() + 1)
        room[1:] = x.flatten()
        shifted.append(room[1:].view(x.shape))
    compare_with_plain(shifted[:-1], shifted[-1], "gelu")


@torch.no_grad()
@pytest.mark.parametrize("B", [1, 64])
def test_graph_of_steps_in_place_equals_eager_steps(B):
    tensors, first = build_token(2, torch.bfloat16, B=B, H=16, K=128, V=128)
    eager, outputs = first.clone(), []
    for _ in range(100):
        outputs.append(prism_step(*tensors, state_BHVK=eager, out_state_BHVK=eager)[0])
    state, graph = first.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = prism_step(*tensors, state_BHVK=state, out_state_BHVK=state)
    for expected in outputs:
        graph.replay()
        assert torch.equal(out, expected)
    assert torch.equal(state, eager)


@torch.no_grad()
@pytest.mark.parametrize("L", [0, 1, 2, 4])
def test_a_thousand_runs_give_the_same_bits(L):
    tensors, state = build_token(L, torch.bfloat16, B=64, H=16, K=128, V=128)
    out, new_state = prism_step(*tensors, state_BHVK=state)
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        again, again_state = prism_step(*tensors, state_BHVK=state)
        changed += (again != out).sum() + (again_state != new_state).sum()
    assert changed.item() == 0


@torch.no_grad()
def test_compiled_step_equals_the_eager_one():
    tensors, state = build_token(2, torch.bfloat16, B=2, H=4, K=64, V=64)

    def decode(state):
        out, state = prism_step(*tensors, state_BHVK=state)
        return prism_step(*tensors, state_BHVK=state * 0.5, out_state_BHVK=state)[0] + out, state

    expected = decode(state.clone())
    actual = torch.compile(decode, fullgraph=True)(state)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@torch.no_grad()
def test_a_state_beyond_32_bit_offsets_is_advanced_everywhere():
    B, H, K, V = 17, 32768, 64, 64
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    state = torch.ones(B, H, V, K, device="cuda")
    key = torch.zeros(B, 1, H, K, device="cuda")
    key[..., 0] = 1
    rows = [torch.ones(B, H, width, device="cuda") for width in (K, V)]
    scalars = torch.ones(B, 1, H, device="cuda"), torch.zeros(B, H, device="cuda")
    out, _ = prism_step(rows[0], key, rows[1] * 3, None, *scalars, state_BHVK=state, out_state_BHVK=state)
    assert torch.equal(out, torch.full_like(out, (3 + K - 1) * K**-0.5))
    assert torch.equal(state[..., 0], rows[1] * 3) and bool((state[..., 1:] == 1).all())
