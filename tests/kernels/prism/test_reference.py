"""The loop against formulas written anew, with explicit matrices and other algorithms."""

import pytest
import torch
import torch.nn.functional as F

from kernels.prism.reference import prism_scan_reference
from tests.kernels.compare import assert_relative_error_below
from tests.kernels.prism.cases import build_case


def run_gated_delta_net(query, key, value, step_size, log_decay, starts, state):
    """S_t = alpha S_{t-1} (I - b k k^T) + b v k^T and o_t = S_t q_t K^(-1/2), one head of one row at a time."""
    T, K = key.shape
    outputs = []
    for t in range(T):
        state = torch.zeros_like(state) if starts[t] else state
        k = key[t].reshape(K, 1)
        kept = log_decay[t].exp() * state @ (torch.eye(K, dtype=torch.float64) - step_size[t] * k @ k.T)
        state = kept + step_size[t] * value[t].reshape(-1, 1) @ k.T
        outputs.append(state @ query[t] / K**0.5)
    return torch.stack(outputs), state


@pytest.mark.parametrize("L", [0, 1])
def test_ranks_zero_and_one_are_gated_delta_net(L):
    case = build_case(L, 30)
    query, key, residual, gain, step_size, log_decay = case.tensors
    value = residual if L == 0 else F.gelu(gain[:, :, 0] * residual)
    out, final = prism_scan_reference(
        *case.tensors, entry_state_BHVK=case.entry_state, document_start_BT=case.document_start
    )
    for row in range(2):
        for head in range(2):
            at = (row, slice(None), head)
            expected = run_gated_delta_net(
                query[at], key[:, :, 0][at], value[at], step_size[:, :, 0][at], log_decay[at],
                case.document_start[row], case.entry_state[row, head],
            )  # fmt: skip
            assert_relative_error_below(1e-12, out=(out[at], expected[0]), final=(final[row, head], expected[1]))


@pytest.mark.parametrize("L", [0, 1, 2, 3, 4])
def test_one_token_writes_a_matrix_of_rank_max_of_l_and_one(L):
    case = build_case(L, 1, packed=False)
    _, written_BHVK = prism_scan_reference(*case.tensors)
    assert (torch.linalg.matrix_rank(written_BHVK) == max(L, 1)).all()


@pytest.mark.parametrize("L", [2, 3, 4])
def test_rank_l_is_rank_one_on_l_times_as_many_tokens(L):
    """A pure write is a token without decay whose step size 2^-50 forgets nothing and whose value is scaled by 2^50."""
    case = build_case(L, 40)
    query, key, residual, gain, step_size, log_decay = case.tensors
    tiny, (B, T, H, K), V = 2.0**-50, query.shape, residual.shape[-1]
    values, rest = [], residual
    for step in range(L):
        write = F.gelu(gain[:, :, step] * rest)
        rest = rest - write
        values.append(write if step == 0 else write * step_size[:, :, step, :, None] / tiny)
    sub_step = torch.full((B, T, L, H), tiny, dtype=torch.float64)
    sub_step[:, :, 0] = step_size[:, :, 0]
    sub_decay = torch.zeros(B, T, L, H, dtype=torch.float64)
    sub_decay[:, :, 0] = log_decay
    sub_start = torch.zeros(B, T, L, dtype=torch.bool)
    sub_start[:, :, 0] = case.document_start
    out, final = prism_scan_reference(
        query.repeat_interleave(L, 1), key.reshape(B, T * L, 1, H, K), torch.stack(values, 2).reshape(B, T * L, H, V),
        None, sub_step.reshape(B, T * L, 1, H), sub_decay.reshape(B, T * L, H),
        entry_state_BHVK=case.entry_state, document_start_BT=sub_start.reshape(B, T * L),
    )  # fmt: skip
    expected = prism_scan_reference(
        *case.tensors, entry_state_BHVK=case.entry_state, document_start_BT=case.document_start
    )
    assert_relative_error_below(1e-12, out=(out[:, L - 1 :: L], expected[0]), final=(final, expected[1]))


def test_identity_activation_with_unit_gain_writes_once():
    """d_1 = r_1 leaves no residual, so every later write is zero."""
    query, key, residual, _, step_size, log_decay = build_case(3, 20, packed=False).tensors
    unit_gain = torch.ones(2, 20, 3, 2, 5, dtype=torch.float64)
    out, _ = prism_scan_reference(query, key, residual, unit_gain, step_size, log_decay, activation="identity")
    plain, _ = prism_scan_reference(query, key[:, :, :1], residual, None, step_size[:, :, :1], log_decay)
    assert_relative_error_below(1e-14, out=(out, plain))


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (1, lambda x: x[:, :-1], r"key_BTMHK.shape=\(2, 8, 2, 2, 6\) must equal \(B, T, M, H, K\)=\(2, 9, 2, 2, 6\)"),
        (3, lambda x: x[:, :, :1], r"gain_BTLHV.shape=.* must equal \(B, T, L=M, H, V\)"),
        (3, lambda x: None, r"key_BTMHK.shape=.* without gains"),
        (0, lambda x: x.long(), "query_BTHK.dtype=torch.int64 must be one of"),
        (0, lambda x: x[0], r"query_BTHK.shape=.* must have 4 dims \(B, T, H, K\)"),
    ],
)
def test_ill_fitting_argument_is_refused_by_name(position, change, message):
    tensors = list(build_case(2, 9).tensors)
    tensors[position] = change(tensors[position])
    with pytest.raises(ValueError, match=message):
        prism_scan_reference(*tensors)


def test_document_starts_must_be_bool():
    with pytest.raises(ValueError, match=r"document_start_BT.dtype=torch.int64 must equal torch.bool"):
        prism_scan_reference(*build_case(1, 4).tensors, document_start_BT=torch.zeros(2, 4, dtype=torch.int64))
