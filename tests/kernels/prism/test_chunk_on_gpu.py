"""The Triton scan on a CUDA device against fp64: every dtype, width, length, decay and launch, and sizes past 2^31."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from kernels import allocate
from kernels.prism import launch
from kernels.prism.chunk import prism_scan
from kernels.prism.chunk_reference import prism_scan_chunked
from kernels.prism.reference import prism_scan_reference
from tests.kernels.compare import assert_error_as_derived, assert_relative_error_below, compute_tile_floor
from tests.kernels.prism import gpu_cases
from tests.kernels.prism.cases import Case, name_results
from tests.kernels.prism.gpu_cases import FP32, Spec

pytestmark = pytest.mark.gpu

# For output and final state, and for gradients.
BARS = {FP32: (1e-5, 1e-5), torch.bfloat16: (5e-3, 8e-3), torch.float16: (5e-3, 8e-3)}
GIB = 2**30


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    gpu_cases.compile_ahead()


@cache
def compute_truth(spec: Spec, activation: str) -> list[torch.Tensor]:
    """By the loop in fp64, on what the spec's dtype made of the inputs."""
    return spec.build().cast(torch.float64).run(prism_scan_reference, activation=activation)


def assert_holds(spec: Spec, actual: list[torch.Tensor], case: Case, truth: list[torch.Tensor]) -> None:
    """Errors are at most twice the plain form's plus the floor of the dtype, and below the bars."""
    activation = spec.options.get("activation", "gelu")
    reference = case.run(prism_scan_chunked, activation=activation)
    assert [x.dtype for x in actual] == [x.dtype for x in reference]
    # Correlated keys: what is written is a difference of up to a chunk of earlier values.
    floor = compute_tile_floor(spec.dtype) * (8 if spec.cosine else 1)
    failures = []
    for name, *triple in zip(name_results(case), actual, reference, truth, strict=True):
        try:
            assert_error_as_derived(floor, BARS[spec.dtype][name.startswith("grad_")], **{name: triple})
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("spec", dict.fromkeys(gpu_cases.HELD), ids=Spec.name)
def test_scan_is_the_loops_in_output_state_and_every_gradient(spec):
    case = spec.build()
    truth = compute_truth(spec, spec.options.get("activation", "gelu"))
    assert_holds(spec, case.run(prism_scan, **spec.options), case, truth)


@pytest.mark.parametrize(("kernel", "setting"), gpu_cases.list_launches())
@pytest.mark.parametrize("spec", gpu_cases.LAUNCHED, ids=Spec.name)
def test_every_launch_of_the_table_is_right(spec, kernel, setting):
    case = spec.build()
    with launch.override(kernel, setting):
        actual = case.run(prism_scan)
    assert_holds(spec, actual, case, compute_truth(spec, "gelu"))


def test_row_of_65536_tokens_equals_fp64_chunk_form():
    case = gpu_cases.LONG.build()
    truth = case.cast(torch.float64).run(prism_scan_chunked)
    assert_holds(gpu_cases.LONG, case.run(prism_scan), case, truth)


@pytest.mark.parametrize("spec", [Spec(), Spec(L=0, K=128, V=128), Spec(K=48, V=64), Spec(dtype=FP32, K=64, V=64)])
def test_memory_is_written_before_it_is_read(spec, monkeypatch):
    case, allocated, fresh = spec.build(), [], allocate.allocate
    expected = case.run(prism_scan)

    def allocate_nan(*sizes, like, dtype=None):
        allocated.append(sizes)
        tensor = fresh(*sizes, like=like, dtype=dtype)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 1 << 30)

    monkeypatch.setattr(allocate, "allocate", allocate_nan)
    actual = case.run(prism_scan)
    assert len(allocated) > 10
    for name, one, other in zip(name_results(case), actual, expected, strict=True):
        assert torch.isfinite(one).all() and torch.equal(one, other), name


def run_once(case: Case, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    state = {"entry_state_BHVK": case.entry_state, "document_start_BT": case.document_start}
    results = prism_scan(*case.tensors, **state)
    return [*(x.detach() for x in results), *torch.autograd.grad(results, case.leaves(), weights)]


@pytest.mark.parametrize("spec", [Spec(T=1000), Spec(T=1000, K=64, V=64), Spec(L=4, T=500)], ids=Spec.name)
def test_same_inputs_give_the_same_bits_a_thousand_times(spec):
    case = spec.build()
    weights = [torch.ones_like(x) for x in prism_scan(*case.tensors)]
    expected = run_once(case, weights)
    assert all(torch.isfinite(x).all() for x in expected)
    differ = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        for one, other in zip(run_once(case, weights), expected, strict=True):
            differ |= (one != other).any()
    assert not differ


def iterate_windows(T: int) -> Iterator[slice]:
    """The row's begin, a stretch about element 2^31 of 16 heads of 128, and the row's end; all begin documents."""
    edge = 2**31 // (16 * 128)
    yield from (slice(0, 192), slice(edge - 128, edge + 64), slice(T - 192, T))


@torch.no_grad()
def build_huge_tensors(T: int) -> list[torch.Tensor]:
    """One row of 16 heads of 128 with one gain, in bf16."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, device="cuda", dtype=torch.bfloat16)

    key = normal(1, T, 1, 16, 128)
    for part in key.split(2**16, dim=1):
        part.copy_(F.normalize(part, dim=-1))
    b, log_decay = normal(1, T, 1, 16).float().sigmoid(), F.logsigmoid(normal(1, T, 16).float())
    return [normal(1, T, 16, 128), key, normal(1, T, 16, 128), normal(1, T, 1, 16, 128), b, log_decay]


def test_documents_of_a_row_past_two_to_the_31_elements_equal_the_same_alone():
    if torch.cuda.mem_get_info()[0] < 115 * GIB:
        pytest.skip("needs 115 GiB of free GPU memory")
    T = 1_100_032
    tensors = [x.requires_grad_() for x in build_huge_tensors(T)]
    assert tensors[0].numel() > 2**31
    start = torch.zeros(1, T, dtype=torch.bool, device="cuda")
    for window in iterate_windows(T):
        start[:, window.start] = True
        start[:, window.stop :][:, :1] = True
    out, final = prism_scan(*tensors, document_start_BT=start)
    weight, final_weight = tensors[2].detach(), torch.randn_like(final)
    grads = torch.autograd.grad([out, final], tensors, [weight, final_weight])
    for window in iterate_windows(T):
        alone = [x[:, window].detach().clone().requires_grad_() for x in tensors]
        out_alone, final_alone = prism_scan(*alone)
        is_last = window.stop == T
        given = [weight[:, window], final_weight if is_last else torch.zeros_like(final)]
        grads_alone = torch.autograd.grad([out_alone, final_alone], alone, given)
        names = ["query", "key", "residual", "gain", "step_size", "log_decay"]
        pairs = {f"grad_{n}": (g[:, window], ga) for n, g, ga in zip(names, grads, grads_alone, strict=True)}
        # The same kernels on the same chunks: nothing but a flipped last bit here and there may differ.
        assert_relative_error_below(1e-3, out=(out[:, window], out_alone), **pairs)
        if is_last:
            assert_relative_error_below(1e-5, final_state=(final, final_alone))


def test_seventy_thousand_heads_equal_fp64_chunk_form():
    case = gpu_cases.MANY_HEADS.build()
    truth = case.cast(torch.float64).run(prism_scan_chunked)
    assert_holds(gpu_cases.MANY_HEADS, case.run(prism_scan), case, truth)


def test_compiled_scan_is_one_graph_at_every_length_and_gives_the_same_bits():
    compiled = torch.compile(prism_scan, fullgraph=True)
    for T in (150, 200):
        case = Spec(T=T).build()
        for name, one, other in zip(name_results(case), case.run(compiled), case.run(prism_scan), strict=True):
            assert torch.equal(one, other), name


def test_kernels_run_on_the_current_stream():
    """Its work before them makes their inputs: a kernel on another stream would read what is not there yet."""
    case = Spec().build()
    expected, stream = case.run(prism_scan), torch.cuda.Stream()
    wide = case.cast(torch.float64)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        actual = wide.cast(torch.bfloat16).run(prism_scan)
    stream.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
