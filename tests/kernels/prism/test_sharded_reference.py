"""The plain scan on shards of a row, each in a thread, against the row in one piece."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels.prism.chunk_reference import prism_scan_chunked
from kernels.prism.sharded_reference import prism_scan_chunked_sharded
from tests.kernels.compare import assert_error_at_most_twice, assert_relative_error_below
from tests.kernels.prism.cases import Case, build_case, name_results
from tests.kernels.prism.thread_group import Echo, ThreadGroup, cut_case, run_cut, run_shards


def assert_equals_whole(case: Case, cuts: tuple[int, ...], limit: float = 1e-10, **options) -> None:
    options = {"chunk_tokens": 16, **options}
    expected = case.run(prism_scan_chunked, **options)
    actual = run_cut(case, prism_scan_chunked_sharded, cuts, **options)
    assert_relative_error_below(limit, **dict(zip(name_results(case), zip(actual, expected, strict=True), strict=True)))


@pytest.mark.parametrize("decay", [0.0, -0.1, "strong", "mixed"])
@pytest.mark.parametrize("L", [0, 1, 2, 3, 4])
def test_row_in_two_shards_equals_row_in_one(L, decay):
    assert_equals_whole(build_case(L, 60, decay=decay), (31,))


@pytest.mark.parametrize("cuts", [(), (25, 50), (20, 40, 60), (10, 20, 30, 40, 50, 60, 70), (1, 2, 40, 41, 79)])
def test_any_number_of_even_and_uneven_shards_equals_one(cuts):
    assert_equals_whole(build_case(2, 80, decay=-0.05), cuts)
    assert_equals_whole(build_case(2, 80, decay=-0.05, packed=False), cuts)


@pytest.mark.parametrize("cuts", [(63,), (64,), (65,), (66,), (6, 7, 64, 65), (2, 3, 4, 5)])
def test_documents_that_begin_before_at_and_after_a_cut_stay_apart(cuts):
    assert_equals_whole(build_case(2, 75), cuts)


def test_shards_of_many_chunks_equal_the_row_at_the_usual_chunk():
    assert_equals_whole(build_case(2, 300, B=1), (100, 180), chunk_tokens=32)


def test_identity_activation_equals_the_row_in_one():
    assert_equals_whole(build_case(3, 40), (17,), activation="identity")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_err_as_the_row_in_one_does(dtype):
    """The floor is what reordered sums of fp32 may lose: ten of its roundings."""
    case = build_case(2, 120, K=16, V=16).cast(dtype)
    truth = case.cast(torch.float64).run(prism_scan_chunked)
    whole, actual = case.run(prism_scan_chunked), run_cut(case, prism_scan_chunked_sharded, (40, 80))
    assert [x.dtype for x in actual] == [x.dtype for x in whole]
    triples = dict(zip(name_results(case), zip(actual, whole, truth, strict=True), strict=True))
    assert_error_at_most_twice(10 * torch.finfo(torch.float32).eps, **triples)


@pytest.mark.parametrize("part", [0, 1])
def test_gradients_of_one_shards_output_or_final_state_reach_the_shards_before_it(part):
    case, cuts = build_case(2, 50, packed=False), (20, 35)
    shards = cut_case(case, cuts)

    def run(group: ThreadGroup) -> tuple[torch.Tensor, ...]:
        tensors = shards[group.index].tensors
        result = prism_scan_chunked_sharded(*tensors, chunk_tokens=16, group=group)[part]
        loss = result.square().sum() if group.index == 1 else 0 * result.sum()
        return torch.autograd.grad(loss, tensors)

    actual = [torch.cat(parts, dim=1) for parts in zip(*run_shards(3, run), strict=True)]
    whole = prism_scan_chunked(*case.tensors, chunk_tokens=16)
    loss = whole[0][:, 20:35].square().sum() if part == 0 else whole[1].square().sum()
    expected = torch.autograd.grad(loss, case.tensors)
    names = name_results(case)[2:]
    assert_relative_error_below(1e-10, **dict(zip(names, zip(actual, expected, strict=True), strict=True)))


def test_final_state_used_on_one_shard_alone_needs_no_zero_on_the_others():
    shards = cut_case(build_case(1, 30, packed=False), (15,))

    def run(group: ThreadGroup) -> torch.Tensor:
        tensors = shards[group.index].tensors
        out, final = prism_scan_chunked_sharded(*tensors, group=group)
        (grad,) = torch.autograd.grad(final.sum() if group.index == 0 else 0 * out.sum(), tensors[1])
        return grad

    assert all(grad.abs().max() > 0 for grad in run_shards(2, run))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(use_reentrant):
    case = build_case(2, 40)

    def checkpointed(*tensors, **options):
        def scan(*given):
            return prism_scan_chunked_sharded(*given, **options)

        return checkpoint(scan, *tensors, use_reentrant=use_reentrant)

    def run(scan):
        shards = cut_case(case, (18,))

        def run_one(group):
            shard = shards[group.index]
            state = {"entry_state_BHVK": shard.entry_state, "document_start_BT": shard.document_start}
            out, final = scan(*shard.tensors, **state, chunk_tokens=16, group=group)
            (out.square().sum() + final.square().sum()).backward()
            return [out.detach(), *(leaf.grad for leaf in shard.leaves()[:-1])]

        return [x for results in run_shards(2, run_one) for x in results]

    pairs = zip(run(checkpointed), run(prism_scan_chunked_sharded), strict=True)
    assert all(torch.equal(actual, expected) for actual, expected in pairs)


def test_one_gather_forward_and_one_backward_of_equal_bytes_where_widths_are():
    shards = cut_case(build_case(2, 40, K=8, V=8), (13,))

    def run(group):
        out, _ = prism_scan_chunked_sharded(*shards[group.index].tensors, group=group)
        out.sum().backward()
        return [group.meeting.payloads[number, group.index].numel() for number in range(group.num_gathers)]

    assert run_shards(2, run) == [[2 * 2 * 16 * 8] * 2] * 2


def test_compiled_scan_breaks_the_graph_and_equals_eager():
    case = build_case(2, 40).cast(torch.float32)
    compiled = torch.compile(prism_scan_chunked_sharded, backend="aot_eager")
    scans = (compiled, prism_scan_chunked_sharded)
    actual, expected = (case.run(scan, chunk_tokens=16, group=Echo()) for scan in scans)
    assert_relative_error_below(1e-6, **dict(zip(name_results(case), zip(actual, expected, strict=True), strict=True)))


def test_misfitting_shapes_are_refused_before_anything_is_gathered():
    case = build_case(1, 3)
    case.tensors[2] = case.tensors[2][:, :2]
    with pytest.raises(ValueError, match=r"residual_BTHV\.shape=\(2, 2, 2, 5\) must equal \(B, T, H, V\)"):
        prism_scan_chunked_sharded(*case.tensors, group=Echo())
