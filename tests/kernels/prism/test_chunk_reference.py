"""The chunk form against the loop: output, final state and every gradient."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels.prism.chunk_reference import prism_scan_chunked
from kernels.prism.reference import prism_scan_reference
from tests.kernels.compare import assert_error_at_most_twice, assert_relative_error_below
from tests.kernels.prism.cases import build_case, name_results


def assert_equals_loop(case, chunk_sizes, **options):
    expected = case.run(prism_scan_reference, **options)
    for chunk_tokens in chunk_sizes:
        actual = case.run(prism_scan_chunked, chunk_tokens=chunk_tokens, **options)
        pairs = dict(zip(name_results(case), zip(actual, expected, strict=True), strict=True))
        assert_relative_error_below(1e-10, **pairs)


@pytest.mark.parametrize("decay", [0.0, -0.1, -20.0])
@pytest.mark.parametrize("L", [0, 1, 2, 3, 4])
def test_packed_row_with_entry_state_equals_loop_for_every_chunk_size(L, decay):
    assert_equals_loop(build_case(L, 150, decay=decay), (16, 32, 64, 128))


@pytest.mark.parametrize("L", [0, 2])
def test_unpacked_row_from_zero_state_equals_loop(L):
    assert_equals_loop(build_case(L, 150, packed=False), (16, 64))


def test_identity_activation_equals_loop():
    assert_equals_loop(build_case(3, 40), (16, 64), activation="identity")


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 500])
def test_any_length_equals_loop(T):
    assert_equals_loop(build_case(2, T, B=1 if T == 500 else 2), (64,))


def test_all_decays_strong_keep_the_relative_precision_of_their_gradient():
    case = build_case(2, 70)
    case.tensors[5] = torch.full_like(case.tensors[5], -20.0).requires_grad_()
    assert_equals_loop(case, (64,))


def test_output_does_not_depend_on_chunk_size():
    case = build_case(2, 150)
    expected = case.run(prism_scan_chunked, chunk_tokens=64)
    for chunk_tokens in (1, 7, 48, 512):
        actual = case.run(prism_scan_chunked, chunk_tokens=chunk_tokens)
        pairs = dict(zip(name_results(case), zip(actual, expected, strict=True), strict=True))
        assert_relative_error_below(1e-10, **pairs)


def test_row_cut_in_two_equals_whole_row():
    case = build_case(2, 100)
    tensors, start = case.tensors, case.document_start
    whole, whole_state = prism_scan_chunked(*tensors, entry_state_BHVK=case.entry_state, document_start_BT=start)
    state, parts = case.entry_state, []
    for cut in (slice(0, 37), slice(37, 100)):
        part = [tensor[:, cut] for tensor in tensors]
        out, state = prism_scan_chunked(*part, entry_state_BHVK=state, document_start_BT=start[:, cut])
        parts.append(out)
    assert_relative_error_below(1e-12, out=(torch.cat(parts, 1), whole), state=(state, whole_state))


def test_documents_of_a_packed_row_equal_documents_alone():
    tensors = build_case(3, 60, packed=False).tensors
    start = torch.zeros(2, 60, dtype=torch.bool)
    start[:, [0, 10, 41]] = True
    packed, _ = prism_scan_chunked(*tensors, document_start_BT=start, chunk_tokens=16)
    alone = [prism_scan_chunked(*[x[:, a:b] for x in tensors])[0] for a, b in ((0, 10), (10, 41), (41, 60))]
    assert_relative_error_below(1e-12, out=(packed, torch.cat(alone, 1)))


@pytest.mark.parametrize(("L", "activation"), [(0, "gelu"), (1, "gelu"), (3, "gelu"), (2, "identity")])
def test_gradients_pass_gradcheck(L, activation):
    case = build_case(L, 5, B=1, H=1, K=2, V=2)

    def scan(*leaves):
        tensors = list(leaves[:-1]) if L else [*leaves[:3], None, *leaves[3:-1]]
        start = torch.tensor([[False, False, False, True, False]])
        options = {"activation": activation, "document_start_BT": start, "chunk_tokens": 2}
        return prism_scan_chunked(*tensors, entry_state_BHVK=leaves[-1], **options)

    assert torch.autograd.gradcheck(scan, case.leaves())


@pytest.mark.parametrize("scan", [prism_scan_reference, prism_scan_chunked])
def test_gradients_equal_finite_differences(scan):
    case, step = build_case(2, 40), 1e-6
    generator = torch.Generator().manual_seed(2)

    def compute_loss(tensors, entry_state):
        out, final = scan(*tensors, entry_state_BHVK=entry_state, document_start_BT=case.document_start)
        return out.square().sum() + final.sin().sum()

    leaves = case.leaves()
    grads = torch.autograd.grad(compute_loss(case.tensors, case.entry_state), leaves)
    for i, leaf in enumerate(leaves):
        direction = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        losses = []
        for sign in (1, -1):
            moved = [x.detach() + sign * step * direction if j == i else x.detach() for j, x in enumerate(leaves)]
            losses.append(compute_loss(moved[:-1], moved[-1]))
        slope = (losses[0] - losses[1]) / (2 * step)
        torch.testing.assert_close((grads[i] * direction).sum(), slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("decay", [-0.1, -20.0])
@pytest.mark.parametrize(
    ("dtype", "max_forward", "max_backward"),
    [(torch.float32, 1e-5, 1e-5), (torch.float16, 5e-3, 8e-3), (torch.bfloat16, 5e-3, 8e-3)],
)
def test_low_precision_error_is_the_loops(dtype, max_forward, max_backward, decay):
    """Both compute in fp32, so the floor is what a chunk's reordered sums may lose: ten fp32 roundings."""
    case = build_case(2, 200, K=32, V=32, decay=decay).cast(dtype)
    truth = case.cast(torch.float64).run(prism_scan_reference)
    reference, actual = case.run(prism_scan_reference), case.run(prism_scan_chunked)
    names = name_results(case)
    triples = dict(zip(names, zip(actual, reference, truth, strict=True), strict=True))
    assert_error_at_most_twice(10 * torch.finfo(torch.float32).eps, **triples)
    pairs = dict(zip(names, zip(actual, truth, strict=True), strict=True))
    assert_relative_error_below(max_forward, **{name: pairs[name] for name in names[:2]})
    assert_relative_error_below(max_backward, **{name: pairs[name] for name in names[2:]})
    assert actual[0].dtype == dtype and actual[1].dtype == torch.float32


@pytest.mark.parametrize("decay", [0.0, -20.0, -1e4])
def test_extreme_decays_leave_every_number_finite(decay):
    case = build_case(2, 150, decay=decay)
    case.tensors[5] = torch.full_like(case.tensors[5], decay)
    for result in case.cast(torch.float32).run(prism_scan_chunked):
        assert torch.isfinite(result).all()


def test_decay_gradient_of_a_documents_first_token_is_zero():
    case = build_case(2, 20)
    log_decay_grad = case.run(prism_scan_chunked)[2 + 5]
    assert log_decay_grad[case.document_start].abs().max() < 1e-13


def test_uninitialised_memory_is_never_read():
    case = build_case(2, 70).cast(torch.float32)
    expected = case.run(prism_scan_chunked)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        actual = case.run(prism_scan_chunked)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_same_inputs_give_the_same_bits():
    case = build_case(2, 150).cast(torch.float32)
    expected = case.run(prism_scan_chunked)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(case.run(prism_scan_chunked), expected, strict=True))


def test_compiled_scan_is_one_graph_and_equals_eager():
    case = build_case(2, 40).cast(torch.float32)
    compiled = torch.compile(prism_scan_chunked, backend="aot_eager", fullgraph=True)
    actual, expected = case.run(compiled, chunk_tokens=16), case.run(prism_scan_chunked, chunk_tokens=16)
    pairs = dict(zip(name_results(case), zip(actual, expected, strict=True), strict=True))
    assert_relative_error_below(1e-6, **pairs)


def test_activation_checkpointing_changes_no_bit():
    case = build_case(2, 70).cast(torch.bfloat16)

    def checkpointed(*tensors, **options):
        return checkpoint(prism_scan_chunked, *tensors, use_reentrant=False, **options)

    expected = case.run(prism_scan_chunked)
    assert all(torch.equal(a, b) for a, b in zip(case.run(checkpointed), expected, strict=True))


def test_second_derivative_is_refused_rather_than_wrong():
    case = build_case(2, 20)
    out, _ = prism_scan_chunked(*case.tensors)
    (grad,) = torch.autograd.grad(out.square().sum(), case.tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
