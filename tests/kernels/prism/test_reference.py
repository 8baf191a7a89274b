"""The loop against formulas written anew, with explicit matrices and other algorithms."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from kernels.prism.reference import prism_scan_reference
from tests.kernels.compare import assert_relative_error_below
from tests.kernels.prism.cases import build_case


def run_gated_delta_net(query, key, value, step_size, log_decay, starts, state):
    """S_t = alpha S_{t-1} (I - b k k^T) + b v k^T and o_t = S_t q_t K^(-1/2), one head of one row at a time.

    Returns the outputs and the state after every token.
    """
    T, K = key.shape
    outputs, states = [], []
    for t in range(T):
        state = torch.zeros_like(state) if starts[t] else state
        k = key[t].reshape(K, 1)
        kept = log_decay[t].exp() * state @ (torch.eye(K, dtype=torch.float64) - step_size[t] * k @ k.T)
        state = kept + step_size[t] * value[t].reshape(-1, 1) @ k.T
        outputs.append(state @ query[t] / K**0.5)
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


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
            assert_relative_error_below(1e-12, out=(out[at], expected[0]), final=(final[row, head], expected[1][-1]))


@pytest.mark.parametrize("L", [0, 1, 2, 3, 4])
def test_one_token_writes_a_matrix_of_rank_max_of_l_and_one(L):
    case = build_case(L, 1, packed=False)
    _, written_BHVK = prism_scan_reference(*case.tensors)
    assert (torch.linalg.matrix_rank(written_BHVK) == max(L, 1)).all()


TINY_STEP = 2.0**-30


def cut_in_sub_tokens(case):
    """A token of L writes as L tokens of one: key, value, step size, log decay and start, each (B, T L, ...).

    The first decays, forgets and writes; the others are pure writes of d_l: no decay, a step size that forgets next to
    nothing, and a value as much larger. Both are powers of two, so that what is written is exactly b_l d_l.
    """
    query, key, residual, gain, step_size, log_decay = case.tensors
    (B, T, H, _), L = query.shape, key.shape[2]
    values, rest = [], residual
    for step in range(L):
        write = F.gelu(gain[:, :, step] * rest)
        rest = rest - write
        values.append(write if step == 0 else write * step_size[:, :, step, :, None] / TINY_STEP)
    later = query.new_zeros(B, T, L - 1, H)
    sub_step_size = torch.cat([step_size[:, :, :1], later + TINY_STEP], dim=2)
    sub_log_decay = torch.cat([log_decay[:, :, None], later], dim=2)
    sub_start = F.pad(case.document_start[:, :, None], (0, L - 1))
    return [x.flatten(1, 2) for x in (key, torch.stack(values, 2), sub_step_size, sub_log_decay, sub_start)]


@pytest.mark.parametrize("L", [2, 3, 4])
def test_rank_l_is_rank_one_on_l_times_as_many_tokens(L):
    """Against explicit matrices of rank 1. Each of the T (L - 1) pure writes also forgets TINY_STEP of the state along
    one key, and no later step enlarges a difference: S is off by at most T (L - 1) TINY_STEP times the largest S."""
    case, T = build_case(L, 40), 40
    query, key = case.tensors[0].repeat_interleave(L, 1), case.tensors[1]
    sub_tokens = cut_in_sub_tokens(case)
    out, final = prism_scan_reference(
        *case.tensors, entry_state_BHVK=case.entry_state, document_start_BT=case.document_start
    )
    for row, head in itertools.product(range(2), range(2)):
        *tensors, starts = [x[row] if x.dim() == 2 else x[row, :, head] for x in sub_tokens]
        expected, states = run_gated_delta_net(query[row, :, head], *tensors, starts, case.entry_state[row, head])
        largest = max(states.norm(dim=(1, 2)).max(), case.entry_state[row, head].norm())
        limit = T * (L - 1) * TINY_STEP * largest
        assert (final[row, head] - states[-1]).norm() <= limit
        read_limit_T = limit * case.tensors[0][row, :, head].norm(dim=-1) / key.shape[-1] ** 0.5
        assert ((out[row, :, head] - expected[L - 1 :: L]).norm(dim=-1) <= read_limit_T).all()


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
