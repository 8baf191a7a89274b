"""Affine maps of shards: summaries, their composition, folds forward and backward, against the row in one piece."""

import pytest
import torch

from kernels.prism.chunk_reference import prism_scan_chunked
from kernels.prism.reference import prism_scan_reference
from kernels.prism.state_passing import (
    AffineMap,
    apply_map,
    compose,
    fold_entries,
    fold_exit_grads,
    summarise_shard,
)
from tests.kernels.compare import assert_relative_error_below
from tests.kernels.prism.cases import Case, build_case
from tests.kernels.prism.thread_group import cut_case

SIZES = B, H, V, K = 2, 3, 4, 5


def build_maps(R: int, dtype=torch.float64) -> AffineMap:
    generator = torch.Generator().manual_seed(0)
    transition = torch.randn(R, B, H, K, K, generator=generator, dtype=torch.float64) * K**-0.5
    return AffineMap(transition.to(dtype), build_states(R).to(dtype))


def build_states(*R: int) -> torch.Tensor:
    return torch.randn(*R, *SIZES, generator=torch.Generator().manual_seed(sum(R)), dtype=torch.float64)


def pick(maps: AffineMap, r: int) -> AffineMap:
    return AffineMap(*(tensor[r] for tensor in maps))


def summarise(case: Case, chunk_tokens: int = 16) -> AffineMap:
    start = case.document_start
    return summarise_shard(*case.tensors[1:], document_start_BT=start, chunk_tokens=chunk_tokens)


def stack(maps: list[AffineMap]) -> AffineMap:
    return AffineMap(*map(torch.stack, zip(*maps, strict=True)))


@pytest.mark.parametrize("decay", [0.0, -0.1, "strong"])
@pytest.mark.parametrize("L", [0, 1, 2, 3, 4])
def test_summary_gives_the_state_that_the_loop_ends_in(L, decay):
    case = build_case(L, 50, decay=decay, packed=False)
    state = build_case(L, 50).entry_state
    _, expected = prism_scan_reference(*case.tensors, entry_state_BHVK=state)
    assert_relative_error_below(1e-10, final=(apply_map(summarise(case), state), expected))


def test_document_start_inside_a_shard_makes_its_transition_zero():
    case = build_case(2, 40)
    case.document_start[0] = False
    transition, _ = summarise(case)
    assert transition[0].abs().max() > 0 and not transition[1].any()


@pytest.mark.parametrize("cuts", [(), (31,), (20, 40), (15, 16, 64, 65), (10, 20, 30, 40, 50, 60, 70)])
@pytest.mark.parametrize("L", [0, 2])
def test_scans_of_shards_from_folded_states_equal_the_row_in_one(L, cuts):
    case = build_case(L, 80, decay=-0.05)
    shards = cut_case(case, cuts)
    states = fold_entries(stack([summarise(shard) for shard in shards]), case.entry_state)
    outs = []
    for shard, entry, exit_ in zip(shards, states[:-1], states[1:], strict=True):
        options = {"entry_state_BHVK": entry, "document_start_BT": shard.document_start}
        out, final = prism_scan_chunked(*shard.tensors, **options)
        assert_relative_error_below(1e-10, final=(final, exit_))
        outs.append(out)
    options = {"entry_state_BHVK": case.entry_state, "document_start_BT": case.document_start}
    expected, expected_final = prism_scan_chunked(*case.tensors, **options)
    assert_relative_error_below(1e-10, out=(torch.cat(outs, 1), expected), final=(states[-1], expected_final))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 64])
def test_summary_does_not_depend_on_the_chunk(chunk_tokens):
    case = build_case(2, 50, packed=False)
    pairs = zip(summarise(case, chunk_tokens), summarise(case, 32), strict=True)
    assert_relative_error_below(1e-10, **dict(zip(AffineMap._fields, pairs, strict=True)))


def test_composition_is_associative_and_applies_first_then_second():
    first, second, third = (pick(build_maps(3), r) for r in range(3))
    left, right = compose(compose(first, second), third), compose(first, compose(second, third))
    pairs = dict(zip(AffineMap._fields, zip(left, right, strict=True), strict=True))
    state = build_states()
    one_by_one = apply_map(third, apply_map(second, apply_map(first, state)))
    assert_relative_error_below(1e-13, state=(apply_map(left, state), one_by_one), **pairs)


def test_fold_equals_composition_from_the_start_to_every_cut():
    maps, entry = build_maps(4), build_states()
    states, whole = fold_entries(maps, entry), None
    assert torch.equal(states[0], entry)
    for r in range(4):
        whole = pick(maps, r) if whole is None else compose(whole, pick(maps, r))
        assert_relative_error_below(1e-13, state=(states[r + 1], apply_map(whole, entry)))


def test_fold_from_no_state_is_the_fold_from_zero():
    maps = build_maps(3)
    assert torch.equal(fold_entries(maps, None), fold_entries(maps, torch.zeros(SIZES, dtype=torch.float64)))
    grads = build_states(3)
    zero = torch.zeros(SIZES, dtype=torch.float64)
    assert torch.equal(fold_exit_grads(maps[0], grads, None), fold_exit_grads(maps[0], grads, zero))


def test_backward_fold_is_the_adjoint_of_the_forward_fold():
    """With A the fold without sources: <A x, y> = <x, A^T y>, y a gradient of the state at every place."""
    transition, entry, grads = build_maps(4).transition_BHKK, build_states(), build_states(5)
    states = fold_entries(AffineMap(transition, torch.zeros_like(grads[:4])), entry)
    back = fold_exit_grads(transition, grads[:4], grads[4])
    torch.testing.assert_close((states * grads).sum(), (entry * back[0]).sum(), rtol=1e-12, atol=0)


def test_backward_fold_equals_autograd_through_the_forward_fold():
    maps, grads = build_maps(4), build_states(5)
    sources = maps.source_BHVK.requires_grad_()
    entry = build_states().requires_grad_()
    loss = (fold_entries(AffineMap(maps.transition_BHKK, sources), entry) * grads).sum()
    grad_sources, grad_entry = torch.autograd.grad(loss, (sources, entry))
    back = fold_exit_grads(maps.transition_BHKK, grads[:4], grads[4])
    assert_relative_error_below(1e-13, after=(back[1:], grad_sources), entry=(back[0], grad_entry))


def test_folds_of_fp32_maps_round_once_and_carry_no_rounding_on():
    maps, entry = build_maps(64, torch.float32), build_states().float()
    truth = fold_entries(AffineMap(*(tensor.double() for tensor in maps)), entry)
    assert torch.equal(fold_entries(maps, entry), truth.float())
    grads = build_states(64).float()
    back = fold_exit_grads(maps.transition_BHKK, grads, entry)
    assert torch.equal(back, fold_exit_grads(maps.transition_BHKK.double(), grads.double(), entry).float())
    assert back.dtype == truth.float().dtype == apply_map(pick(maps, 0), entry).dtype == torch.float32


def test_misfitting_shapes_are_refused_by_name():
    case = build_case(1, 3)
    case.tensors[2] = case.tensors[2][:, :2]
    with pytest.raises(ValueError, match=r"residual_BTHV\.shape"):
        summarise(case)
