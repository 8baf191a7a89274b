"""The Triton scan against the fp64 loop, by Triton's interpreter on a CPU: every kernel and branch at small shapes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels import allocate
from kernels.prism.chunk import prism_scan
from kernels.prism.reference import prism_scan_reference
from tests.kernels.compare import assert_error_as_derived, assert_relative_error_below, compute_tile_floor
from tests.kernels.prism.cases import Case, build_case, name_results

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has test_chunk_on_gpu.py")

ROOT = Path(__file__).parents[3]
# For output and final state, and for gradients.
BARS = {torch.float32: (1e-5, 1e-5), torch.float16: (5e-3, 8e-3)}


def build_small_case(L: int, T: int, *, B: int = 1, H: int = 2, K: int = 16, V: int = 32, **settings) -> Case:
    return build_case(L, T, B=B, H=H, K=K, V=V, **settings)


def assert_equals_loop(case: Case, *, activation="gelu", magnified: float = 1, **options) -> None:
    truth = case.cast(torch.float64).run(prism_scan_reference, activation=activation)
    reference = case.run(prism_scan_reference, activation=activation)
    actual = case.run(prism_scan, activation=activation, **{"chunk_tokens": 16, **options})
    assert [x.dtype for x in actual] == [x.dtype for x in reference]
    dtype = case.tensors[0].dtype
    for name, *triple in zip(name_results(case), actual, reference, truth, strict=True):
        bar = BARS[dtype][name.startswith("grad_")]
        assert_error_as_derived(magnified * compute_tile_floor(dtype), bar, **{name: triple})


def assert_same_bits(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.isfinite(one).all() and torch.equal(one, other)


@pytest.mark.parametrize("L", [0, 1, 2, 3, 4])
def test_rows_of_documents_inside_at_and_across_chunk_edges_equal_loop(L):
    assert_equals_loop(build_small_case(L, 21, B=2, H=1).cast(torch.float32))


@pytest.mark.parametrize("L", [0, 3])
def test_sixteen_bit_kernels_err_as_their_roundings_allow(L):
    assert_equals_loop(build_small_case(L, 21, B=2).cast(torch.float16))


@pytest.mark.parametrize("T", [1, 15, 16, 17, 53])
def test_any_length_from_zero_state_equals_loop(T):
    assert_equals_loop(build_small_case(2, T, packed=False).cast(torch.float32))


@pytest.mark.parametrize(
    ("decay", "dtype"),
    [*((decay, torch.float32) for decay in (0.0, "strong", "mixed", "vanishing")), ("mixed", torch.float16)],
)
def test_any_decay_equals_loop(decay, dtype):
    assert_equals_loop(build_small_case(2, 37, H=1, decay=decay).cast(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cosine", [0.5, 0.95])
def test_correlated_keys_with_step_sizes_near_one_equal_loop(cosine, dtype):
    """What is written is then a difference of up to 16 earlier values: roundings grow by the root of that."""
    case = build_small_case(2, 37, H=1, cosine=cosine, decay=-0.05, packed=False).cast(dtype)
    assert_equals_loop(case, magnified=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("K", "V"), [(48, 16), (16, 48), (144, 80), (256, 16)])
def test_widths_that_are_no_power_of_two_or_several_blocks_equal_loop(K, V, dtype):
    assert_equals_loop(build_small_case(2, 18, H=1, K=K, V=V).cast(dtype))


@pytest.mark.parametrize(("dtype", "chunk_tokens"), [(torch.float32, 32), (torch.float16, 32), (torch.float16, 64)])
def test_longer_chunks_equal_loop(dtype, chunk_tokens):
    assert_equals_loop(build_small_case(2, 70, H=1).cast(dtype), chunk_tokens=chunk_tokens)


def test_chunks_of_sixteen_and_thirty_two_tokens_agree():
    case = build_small_case(2, 40, H=1).cast(torch.float32)
    short, long = (case.run(prism_scan, chunk_tokens=chunk_tokens) for chunk_tokens in (16, 32))
    pairs = dict(zip(name_results(case), zip(short, long, strict=True), strict=True))
    assert_relative_error_below(compute_tile_floor(torch.float32), **pairs)


def test_identity_activation_equals_loop():
    assert_equals_loop(build_small_case(2, 18, H=1).cast(torch.float32), activation="identity")


@pytest.mark.parametrize("L", [0, 2])
def test_wide_step_sizes_decays_and_state_beside_sixteen_bit_keys_equal_loop(L):
    assert_equals_loop(build_small_case(L, 18).cast_as_model(torch.float16))


def test_documents_of_a_row_equal_documents_alone():
    tensors = [x.detach() for x in build_small_case(2, 40, H=1, packed=False).cast(torch.float32).tensors]
    start = torch.zeros(1, 40, dtype=torch.bool)
    start[:, [0, 10, 32]] = True
    packed, _ = prism_scan(*tensors, document_start_BT=start, chunk_tokens=16)
    alone = [prism_scan(*[x[:, a:b] for x in tensors], chunk_tokens=16)[0] for a, b in ((0, 10), (10, 32), (32, 40))]
    assert_relative_error_below(1e-6, out=(packed, torch.cat(alone, 1)))


def test_row_cut_in_two_equals_whole_row():
    case = build_small_case(2, 40, H=1).cast(torch.float32)
    tensors, start = [x.detach() for x in case.tensors], case.document_start
    options = {"entry_state_BHVK": case.entry_state.detach(), "document_start_BT": start, "chunk_tokens": 16}
    whole, whole_state = prism_scan(*tensors, **options)
    state, parts = case.entry_state.detach(), []
    for cut in (slice(0, 21), slice(21, 40)):
        options = {"entry_state_BHVK": state, "document_start_BT": start[:, cut], "chunk_tokens": 16}
        out, state = prism_scan(*[x[:, cut] for x in tensors], **options)
        parts.append(out)
    assert_relative_error_below(1e-6, out=(torch.cat(parts, 1), whole), state=(state, whole_state))


@pytest.mark.parametrize(("L", "T", "dtype"), [(0, 17, torch.float32), (2, 33, torch.float32), (2, 33, torch.float16)])
def test_memory_is_written_before_it_is_read(L, T, dtype, monkeypatch):
    case = build_small_case(L, T, H=1, K=48, V=48).cast(dtype)
    expected = case.run(prism_scan, chunk_tokens=16)
    allocated, fresh = [], allocate.allocate

    def allocate_nan(*sizes, like, dtype=None):
        allocated.append(sizes)
        tensor = fresh(*sizes, like=like, dtype=dtype)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 1 << 30)

    monkeypatch.setattr(allocate, "allocate", allocate_nan)
    assert_same_bits(case.run(prism_scan, chunk_tokens=16), expected)
    assert len(allocated) > 10


def test_same_inputs_give_the_same_bits():
    case = build_small_case(2, 33, H=1).cast(torch.float16)
    expected = case.run(prism_scan, chunk_tokens=16)
    assert_same_bits(case.run(prism_scan, chunk_tokens=16), expected)


def test_inputs_that_are_not_contiguous_give_the_same_bits():
    case = build_small_case(2, 18, B=2).cast(torch.float32)

    def scatter(tensor):
        """The same values, heads before tokens in memory, every second element of a wider last dim."""
        wide = torch.stack([tensor, torch.full_like(tensor, 7)], -1).movedim(1, -1).contiguous().movedim(-1, 1)
        return wide[..., 0]

    def scan(*tensors, entry_state_BHVK, document_start_BT, chunk_tokens):
        out, final = prism_scan(
            *map(scatter, tensors), entry_state_BHVK=scatter(entry_state_BHVK),
            document_start_BT=document_start_BT.mT.contiguous().mT, chunk_tokens=chunk_tokens,
        )  # fmt: skip
        return out.mT.mT, final

    assert not scatter(case.tensors[0]).is_contiguous()
    assert_same_bits(case.run(scan, chunk_tokens=16), case.run(prism_scan, chunk_tokens=16))


def test_expanded_gradient_of_the_output_equals_a_dense_one():
    case = build_small_case(1, 18, H=1).cast(torch.float32)
    out, final = prism_scan(*case.tensors, entry_state_BHVK=case.entry_state, chunk_tokens=16)
    expanded = torch.autograd.grad(out.sum() + final.sum(), case.leaves(), retain_graph=True)
    ones = [torch.ones_like(out), torch.ones_like(final)]
    assert_same_bits(list(expanded), list(torch.autograd.grad([out, final], case.leaves(), ones)))


@pytest.mark.parametrize("part", [0, 1])
def test_gradients_of_output_or_final_state_alone_equal_loops(part):
    case = build_small_case(2, 21, H=1).cast(torch.float32)

    def run(scan, case):
        state = {"entry_state_BHVK": case.entry_state, "document_start_BT": case.document_start, "chunk_tokens": 16}
        result = scan(*case.tensors, **state)[part]
        return torch.autograd.grad(result.square().sum(), case.leaves(), allow_unused=True)

    expected, pairs = run(prism_scan_reference, case.cast(torch.float64)), {}
    for name, got, wanted in zip(name_results(case)[2:], run(prism_scan, case), expected, strict=True):
        wanted = torch.zeros_like(got) if wanted is None else wanted
        pairs[name] = torch.zeros_like(wanted) if got is None else got, wanted
    assert_relative_error_below(1e-5, **pairs)


@pytest.mark.parametrize("wanted", [(0,), (3,), (5,), (6,), (1, 4)])
def test_gradients_of_some_inputs_equal_those_of_all(wanted):
    case = build_small_case(2, 18, H=1).cast(torch.float32)
    expected = case.run(prism_scan, chunk_tokens=16)[2:]
    some = case.cast(torch.float32)
    for index, leaf in enumerate(some.leaves()):
        leaf.requires_grad_(index in wanted)

    class Chosen(Case):
        def leaves(self):
            return [leaf for leaf in super().leaves() if leaf.requires_grad]

    chosen = Chosen(some.tensors, some.entry_state, some.document_start)
    assert_same_bits(chosen.run(prism_scan, chunk_tokens=16)[2:], [expected[index] for index in wanted])


def test_inference_equals_training_and_keeps_no_graph():
    case = build_small_case(2, 18, H=1).cast(torch.float16)
    expected = case.run(prism_scan, chunk_tokens=16)[:2]
    with torch.no_grad():
        state = {"entry_state_BHVK": case.entry_state, "document_start_BT": case.document_start}
        actual = prism_scan(*case.tensors, **state, chunk_tokens=16)
    assert not actual[0].requires_grad and not actual[1].requires_grad
    assert_same_bits(list(actual), expected)


def test_compiled_scan_is_one_graph_at_every_length_and_equals_eager():
    compiled = torch.compile(prism_scan, backend="aot_eager", fullgraph=True)
    for L, T in ((2, 17), (2, 20), (0, 17)):
        case = build_small_case(L, T, H=1).cast(torch.float32)
        actual, expected = (case.run(scan, chunk_tokens=16) for scan in (compiled, prism_scan))
        pairs = dict(zip(name_results(case), zip(actual, expected, strict=True), strict=True))
        assert_relative_error_below(1e-6, **pairs)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(use_reentrant):
    case = build_small_case(2, 18, H=1).cast(torch.float16)

    def checkpointed(*tensors, **options):
        def scan(*given):
            return prism_scan(*given, **options)

        return checkpoint(scan, *tensors, use_reentrant=use_reentrant)

    # Reentrant checkpointing returns gradients through .backward() alone, so leaves are read there.
    def run(scan):
        copy = case.cast(torch.float16)
        state = {"entry_state_BHVK": copy.entry_state, "document_start_BT": copy.document_start}
        out, final = scan(*copy.tensors, **state, chunk_tokens=16)
        (out.float().square().sum() + final.square().sum()).backward()
        return [out.detach(), final.detach(), *(leaf.grad for leaf in copy.leaves()[:-1])]

    assert_same_bits(run(checkpointed), run(prism_scan))


def test_second_derivative_is_refused_rather_than_wrong():
    case = build_small_case(2, 17, H=1).cast(torch.float32)
    out, _ = prism_scan(*case.tensors, chunk_tokens=16)
    (grad,) = torch.autograd.grad(out.square().sum(), case.tensors[0], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum(), case.tensors[1])


def test_operator_is_registered_as_compilers_expect():
    case = build_small_case(2, 17, H=1).cast(torch.float32)
    given = (*case.tensors, case.entry_state, case.document_start, True, 16)
    torch.library.opcheck(torch.ops.prism.chunk_scan, given, test_utils=("test_schema", "test_faketensor"))


def call(L=1, T=2, dtype=torch.float32, **settings):
    case = build_small_case(L, T, **settings).cast(dtype)
    return prism_scan(*case.tensors, entry_state_BHVK=case.entry_state, document_start_BT=case.document_start)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": torch.float64}, r"query_BTHK\.dtype=torch\.float64 must .*prism_scan_chunked"),
        ({"K": 272}, r"query_BTHK\.shape\[3\]=272 must be a multiple of 16"),
        ({"K": 24}, r"query_BTHK\.shape\[3\]=24 must be a multiple of 16"),
        ({"V": 24}, r"residual_BTHV\.shape\[3\]=24 must be a multiple of 16"),
        ({"V": 272}, r"residual_BTHV\.shape\[3\]=272 must be a multiple of 16"),
        ({"L": 5}, r"=5 must be at most 4"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        call(**settings)


def test_tensors_of_different_dtypes_are_refused_by_name():
    case = build_small_case(1, 2).cast(torch.float32)
    case.tensors[1] = case.tensors[1].detach().half()
    with pytest.raises(ValueError, match=r"key_BTMHK\.dtype=torch\.float16 must equal torch\.float32"):
        prism_scan(*case.tensors)


def test_misfitting_shapes_are_refused_as_the_references_refuse_them():
    case = build_small_case(1, 3).cast(torch.float32)
    case.tensors[2] = case.tensors[2][:, :2]
    with pytest.raises(ValueError, match=r"residual_BTHV\.shape=\(1, 2, 2, 32\) must equal \(B, T, H, V\)"):
        prism_scan(*case.tensors)


def test_cpu_tensors_are_refused_where_nothing_interprets():
    program = """
from kernels.prism.chunk import prism_scan
from tests.kernels.prism.cases import build_case
import torch
prism_scan(*build_case(1, 2, K=16, V=16).cast(torch.float32).tensors)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "ValueError: query_BTHK.device=cpu must be the CUDA device" in ended.stderr
    assert "prism_scan_chunked" in ended.stderr
