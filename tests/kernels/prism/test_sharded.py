"""The Triton scan on shards of a row, each in a thread, by Triton's interpreter on a CPU, against the fp64 loop."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels import allocate
from kernels.prism.chunk import prism_scan
from kernels.prism.chunk_fwd import Sizes, prepare_chunks
from kernels.prism.reference import prism_scan_reference
from kernels.prism.sharded import prism_scan_sharded, summarise_chunks
from kernels.prism.state_passing import AffineMap, split_map, summarise_shard
from tests.kernels.compare import assert_error_as_derived, assert_relative_error_below, compute_tile_floor
from tests.kernels.prism.cases import Case, build_case, name_results
from tests.kernels.prism.thread_group import Echo, cut_case, run_cut, run_shards

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="threads meet in the interpreter's backward alone")

# For output and final state, and for gradients.
BARS = {torch.float32: (1e-5, 1e-5), torch.float16: (5e-3, 8e-3)}


def build_small_case(L: int, T: int, *, B: int = 1, H: int = 1, K: int = 16, V: int = 32, **settings) -> Case:
    return build_case(L, T, B=B, H=H, K=K, V=V, **settings)


def assert_equals_loop(case: Case, cuts: tuple[int, ...], **options) -> None:
    truth, reference = case.cast(torch.float64).run(prism_scan_reference), case.run(prism_scan_reference)
    actual = run_cut(case, prism_scan_sharded, cuts, **{"chunk_tokens": 16, **options})
    assert [x.dtype for x in actual] == [x.dtype for x in reference]
    dtype = case.tensors[0].dtype
    for name, *triple in zip(name_results(case), actual, reference, truth, strict=True):
        bar = BARS[dtype][name.startswith("grad_")]
        assert_error_as_derived(compute_tile_floor(dtype), bar, **{name: triple})


@pytest.mark.parametrize("L", [0, 1, 2, 3, 4])
def test_row_in_two_shards_equals_loop(L):
    assert_equals_loop(build_small_case(L, 20).cast(torch.float32), (9,))


@pytest.mark.parametrize("L", [0, 2])
def test_sixteen_bit_shards_err_as_their_roundings_allow(L):
    assert_equals_loop(build_small_case(L, 36, H=2, packed=False).cast(torch.float16), (17,))


@pytest.mark.parametrize("cuts", [(16, 17, 34), (1, 2, 3, 4, 5, 6, 7)])
def test_any_number_of_even_and_uneven_shards_equals_loop(cuts):
    case = build_small_case(2, cuts[-1] + 4, decay=-0.05, packed=False)
    assert_equals_loop(case.cast(torch.float32), cuts)


@pytest.mark.parametrize("start", [7, 8, 9])
def test_document_that_begins_before_at_or_after_a_cut_stays_apart(start):
    case = build_small_case(2, 16).cast(torch.float32)
    case.document_start[0] = torch.arange(16) == start
    assert_equals_loop(case, (8,))


@pytest.mark.parametrize(
    ("decay", "dtype"), [(0.0, torch.float16), ("strong", torch.float32), ("mixed", torch.float16)]
)
def test_any_decay_equals_loop(decay, dtype):
    assert_equals_loop(build_small_case(1, 36, decay=decay, packed=False).cast(dtype), (20,))


@pytest.mark.parametrize(("K", "V"), [(48, 16), (16, 80)])
def test_widths_that_are_no_power_of_two_or_several_blocks_equal_loop(K, V):
    assert_equals_loop(build_small_case(2, 20, K=K, V=V).cast(torch.float16), (10,))


@pytest.mark.parametrize(("dtype", "chunk_tokens"), [(torch.float32, 32), (torch.float16, 64)])
def test_longer_chunks_equal_loop(dtype, chunk_tokens):
    assert_equals_loop(
        build_small_case(1, 2 * chunk_tokens).cast(dtype), (chunk_tokens + 3,), chunk_tokens=chunk_tokens
    )


def test_wide_step_sizes_decays_and_state_beside_sixteen_bit_keys_equal_loop():
    assert_equals_loop(build_small_case(2, 18).cast_as_model(torch.float16), (7,))


@pytest.mark.parametrize("L", [0, 2])
def test_kernels_summary_equals_the_plain_one(L):
    case = build_small_case(L, 36, B=2, H=2, packed=False).cast(torch.float32)
    _, key, residual, gain, step_size, log_decay = tensors = [None if x is None else x.detach() for x in case.tensors]
    sizes = Sizes(2, 36, 2, 16, 32, key.shape[2], 16)
    prepared = prepare_chunks(sizes, key, residual, gain, step_size, log_decay, None, True)
    summary = split_map(summarise_chunks(sizes, key, prepared))
    pairs = zip(summary, summarise_shard(*[None if x is None else x.double() for x in tensors[1:]]), strict=True)
    assert_relative_error_below(1e-5, **dict(zip(AffineMap._fields, pairs, strict=True)))


def test_one_shard_gives_the_bits_of_the_scan():
    case = build_small_case(2, 20).cast(torch.float16)
    expected = case.run(prism_scan, chunk_tokens=16)
    actual = run_cut(case, prism_scan_sharded, (), chunk_tokens=16)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_memory_is_written_before_it_is_read(monkeypatch):
    case, cuts = build_small_case(2, 22, K=48).cast(torch.float32), (17,)
    expected = run_cut(case, prism_scan_sharded, cuts, chunk_tokens=16)
    fresh = allocate.allocate

    def allocate_nan(*sizes, like, dtype=None):
        return fresh(*sizes, like=like, dtype=dtype).fill_(float("nan"))

    monkeypatch.setattr(allocate, "allocate", allocate_nan)
    actual = run_cut(case, prism_scan_sharded, cuts, chunk_tokens=16)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_final_state_used_on_one_shard_alone_needs_no_zero_on_the_others():
    shards = cut_case(build_small_case(1, 8, packed=False).cast(torch.float32), (4,))

    def run(group):
        tensors = shards[group.index].tensors
        out, final = prism_scan_sharded(*tensors, group=group, chunk_tokens=16)
        (grad,) = torch.autograd.grad(final.sum() if group.index == 0 else 0 * out.sum(), tensors[1])
        return grad

    assert all(grad.abs().max() > 0 for grad in run_shards(2, run))


def test_activation_checkpointing_changes_no_bit():
    case = build_small_case(2, 10).cast(torch.float16)

    def checkpointed(*tensors, **options):
        return checkpoint(prism_scan_sharded, *tensors, use_reentrant=False, **options)

    pairs = [run_cut(case, scan, (4,), chunk_tokens=16) for scan in (checkpointed, prism_scan_sharded)]
    assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))


def test_compiled_scan_breaks_the_graph_and_equals_eager():
    case = build_small_case(1, 17).cast(torch.float32)
    compiled = torch.compile(prism_scan_sharded, backend="aot_eager")
    actual, expected = (case.run(scan, chunk_tokens=16, group=Echo()) for scan in (compiled, prism_scan_sharded))
    assert_relative_error_below(1e-6, **dict(zip(name_results(case), zip(actual, expected, strict=True), strict=True)))


def test_fp64_is_refused_by_the_name_of_the_plain_form():
    case = build_small_case(1, 4)
    with pytest.raises(ValueError, match=r"query_BTHK\.dtype=torch\.float64 must .*prism_scan_chunked_sharded"):
        prism_scan_sharded(*case.tensors, group=Echo())
