"""Both chunk forms against flash-linear-attention's operators, written by others, on a CUDA device in bf16.

They come with the optional extra `peers`, without which there is nothing to compare with.
"""

import warnings

import pytest
import torch
import triton

from kernels.prism.chunk import prism_scan
from kernels.prism.chunk_reference import prism_scan_chunked
from kernels.prism.reference import compute_writes, prism_scan_reference
from tests.kernels.compare import assert_relative_error_below, compute_relative_error
from tests.kernels.prism.cases import Case, build_case, name_results

pytestmark = pytest.mark.gpu

# A peer bears witness to the definition, not to its own accuracy, which in bf16 is a percent or so and, where a
# gradient is a difference of sums (decays, step sizes), several: another recurrence's output is off by ten times the
# limit, as the last test shows.
FORWARD_LIMIT, GRADIENT_LIMIT, DIFFERENCE_LIMIT = 2**-5, 2**-4, 2**-3
DIFFERENCES = ("grad_step_size", "grad_log_decay")
# What bf16 costs ours at most; where it costs the peer more, ours is still to be nearer than the peer.
OUR_FORWARD_LIMIT, OUR_GRADIENT_LIMIT = 5e-3, 8e-3


@pytest.fixture(scope="module", autouse=True)
def fla():
    return pytest.importorskip("fla.ops", reason="the extra `peers` is not installed", exc_type=ImportError)


def is_backward_trusted() -> bool:
    """Triton 3.4.0 to 3.7.0 miscompiles fla's backward on Hopper: there only its forward is right."""
    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3])
    return not ((3, 4, 0) <= version <= (3, 7, 0) and torch.cuda.get_device_capability()[0] == 9)


def run_gated_delta_rule(query, key, residual, gain, step_size, log_decay, *, entry_state_BHVK, document_start_BT):
    """L = 1: its rank-1 write of the value d_1 with the key and step size of the forget term."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    value = compute_writes(residual, gain, torch.ones_like(step_size), "gelu")[:, :, 0].to(query.dtype)
    out, final_BHKV = chunk_gated_delta_rule(
        query, key[:, :, 0], value, log_decay.float(), step_size[:, :, 0],
        initial_state=entry_state_BHVK.float().mT.contiguous(), output_final_state=True,
    )  # fmt: skip
    return out, final_BHKV.mT


def run_comba(query, key, residual, gain, step_size, log_decay, *, entry_state_BHVK, document_start_BT):
    """Any L: a token as L sub-tokens, the first of which forgets along p = k_1; the rest forget nothing, with p = 0."""
    from fla.ops.comba import chunk_comba

    (B, T, L, H, K), V = key.shape, residual.shape[-1]
    value = compute_writes(residual, gain, torch.ones_like(step_size), "gelu").to(query.dtype)
    nothing = key.new_zeros(B, T, L - 1, H, K)
    forget_key = torch.cat([key[:, :, :1], nothing], dim=2)
    sub_decay = torch.cat([log_decay[:, :, None], log_decay.new_zeros(B, T, L - 1, H)], dim=2).float()
    out, final_BHKV = chunk_comba(
        query.repeat_interleave(L, 1), key.reshape(B, T * L, H, K), value.reshape(B, T * L, H, V),
        forget_key.reshape(B, T * L, H, K), sub_decay.reshape(B, T * L, H), step_size.reshape(B, T * L, H),
        initial_state=entry_state_BHVK.float().mT.contiguous(), output_final_state=True,
    )  # fmt: skip
    return out[:, L - 1 :: L], final_BHKV.mT


SCANS = [prism_scan_chunked, prism_scan]


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize(("L", "peer"), [(1, run_gated_delta_rule), (1, run_comba), (2, run_comba), (3, run_comba)])
def test_peer_gives_the_same_output_state_and_gradients(L, peer, scan):
    """On one document from a non-zero state: the peer is near the loop in fp64, and ours is within its own limits or
    nearer than the peer."""
    packed = build_case(L, 150, K=64, V=64)
    case = Case(packed.tensors, packed.entry_state, None).cast(torch.bfloat16, "cuda")
    truth = case.cast(torch.float64).run(prism_scan_reference)
    if is_backward_trusted():
        ours, theirs = case.run(scan), case.run(peer)
    else:
        warnings.warn(f"forward only: Triton {triton.__version__} miscompiles fla's backward on Hopper", stacklevel=1)
        ours, theirs = run_forward(case, scan), run_forward(case, peer)
    # The forward's two results come first, so that without gradients zip ends after them.
    for name, actual, expected, exact in zip(name_results(case), ours, theirs, truth, strict=False):
        assert_relative_error_below(choose_limit(name), **{name: (expected, exact)})
        ours_at_most = OUR_GRADIENT_LIMIT if name.startswith("grad_") else OUR_FORWARD_LIMIT
        limit = max(ours_at_most, compute_relative_error(expected, exact))
        assert_relative_error_below(limit, **{name: (actual, exact)})


def choose_limit(name: str) -> float:
    """Of the peer's distance from fp64."""
    if name in DIFFERENCES:
        return DIFFERENCE_LIMIT
    return GRADIENT_LIMIT if name.startswith("grad_") else FORWARD_LIMIT


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("peer", [run_gated_delta_rule, run_comba])
def test_peer_is_far_from_a_write_of_one_step_more(peer, scan):
    packed = build_case(2, 150, K=64, V=64)
    case = Case(packed.tensors, packed.entry_state, None).cast(torch.bfloat16, "cuda")
    query, key, residual, gain, step_size, log_decay = case.tensors
    one_step = Case(
        [query, key[:, :, :1], residual, gain[:, :, :1], step_size[:, :, :1], log_decay], case.entry_state, None
    )
    out, _ = run_forward(case, scan)
    peer_out, _ = run_forward(one_step, peer)
    assert compute_relative_error(peer_out, out) > 10 * FORWARD_LIMIT


@torch.no_grad()
def run_forward(case: Case, scan) -> tuple[torch.Tensor, torch.Tensor]:
    return scan(*case.tensors, entry_state_BHVK=case.entry_state, document_start_BT=None)
