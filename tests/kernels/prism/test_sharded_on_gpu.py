"""The Triton scan on shards of a row on one CUDA device, shard after shard, against fp64 and against the uncut row."""

import pytest
import torch

from kernels import allocate
from kernels.prism.chunk import prism_scan
from kernels.prism.chunk_reference import prism_scan_chunked
from kernels.prism.sharded import prism_scan_sharded
from tests.kernels.compare import assert_error_as_derived, compute_relative_error, compute_tile_floor
from tests.kernels.prism.cases import name_results
from tests.kernels.prism.gpu_cases import FP16, FP32, Spec
from tests.kernels.prism.thread_group import run_cut, run_in_rounds

pytestmark = pytest.mark.gpu

# For output and final state, and for gradients.
BARS = {FP32: (1e-5, 1e-5), torch.bfloat16: (5e-3, 8e-3), FP16: (5e-3, 8e-3)}
# Of 16-bit shards against the same kernels on the uncut row: the same sums, other roundings where the cut lies.
UNCUT_BAR = 3e-3
SPECS = [
    *(Spec(L=L) for L in range(5)),
    *(Spec(dtype=dtype, K=64, V=64) for dtype in (FP32, FP16)),
    *(Spec(decay=decay) for decay in (0.0, "strong", "mixed")),
    Spec(K=48, V=80),
    Spec(K=256, V=256),
    Spec(packed=False, T=1000),
]


def run_on_shards(spec: Spec, cuts: tuple[int, ...]) -> list[torch.Tensor]:
    return run_cut(spec.build(), prism_scan_sharded, cuts, run_all=run_in_rounds)


@pytest.mark.parametrize("spec", SPECS, ids=Spec.name)
@pytest.mark.parametrize("share", [(0.5,), (0.1, 0.43, 0.64)], ids=["two", "four"])
def test_shards_give_the_rows_output_state_and_every_gradient(spec, share):
    case = spec.build()
    actual = run_on_shards(spec, tuple(int(part * spec.T) for part in share))
    truth, reference = case.cast(torch.float64).run(prism_scan_chunked), case.run(prism_scan_chunked)
    for name, *triple in zip(name_results(case), actual, reference, truth, strict=True):
        bar = BARS[spec.dtype][name.startswith("grad_")]
        assert_error_as_derived(compute_tile_floor(spec.dtype), bar, **{name: triple})


@pytest.mark.parametrize("cut", [63, 64, 65, 75])
def test_bf16_shards_are_near_the_uncut_row(cut):
    case = Spec().build()
    pairs = zip(name_results(case), run_on_shards(Spec(), (cut,)), case.run(prism_scan), strict=True)
    for name, one, other in list(pairs)[:2]:
        assert compute_relative_error(one, other) <= UNCUT_BAR, name


def test_memory_is_written_before_it_is_read(monkeypatch):
    expected, fresh = run_on_shards(Spec(), (70,)), allocate.allocate

    def allocate_nan(*sizes, like, dtype=None):
        return fresh(*sizes, like=like, dtype=dtype).fill_(float("nan"))

    monkeypatch.setattr(allocate, "allocate", allocate_nan)
    assert all(torch.equal(one, other) for one, other in zip(run_on_shards(Spec(), (70,)), expected, strict=True))


def test_same_inputs_give_the_same_bits():
    expected = run_on_shards(Spec(T=500), (130, 257))
    for _ in range(100):
        actual = run_on_shards(Spec(T=500), (130, 257))
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
