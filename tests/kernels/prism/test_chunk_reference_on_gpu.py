"""The chunk form on a CUDA device, in the dtypes that training uses, against the fp64 loop on the same inputs."""

import pytest
import torch

from kernels.prism.chunk_reference import prism_scan_chunked
from kernels.prism.reference import prism_scan_reference
from tests.kernels.compare import assert_relative_error_below
from tests.kernels.prism.cases import build_case, name_results

pytestmark = pytest.mark.gpu


def compare_with_loop(dtype: torch.dtype, L: int, T: int, decay: float) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    rounded = build_case(L, T, K=64, V=64, decay=decay).cast(dtype)
    expected = rounded.cast(torch.float64).run(prism_scan_reference)
    actual = rounded.cast(dtype, "cuda").run(prism_scan_chunked, chunk_tokens=64)
    results = zip(name_results(rounded), actual, expected, strict=True)
    return {name: (got.cpu().double(), wanted) for name, got, wanted in results}


@pytest.mark.parametrize("decay", [0.0, -0.1, -20.0])
@pytest.mark.parametrize("L", [0, 1, 2, 3, 4])
def test_bf16_output_errs_by_half_a_percent_and_gradients_by_eight_tenths_at_most(L: int, decay: float) -> None:
    results = compare_with_loop(torch.bfloat16, L, 150, decay)
    assert_relative_error_below(5e-3, **{name: results.pop(name) for name in ("out", "final_state")})
    assert_relative_error_below(8e-3, **results)


@pytest.mark.parametrize("T", [1, 63, 64, 65, 500])
def test_fp32_errs_by_a_hundred_thousandth_at_most_at_any_length(T: int) -> None:
    assert_relative_error_below(1e-5, **compare_with_loop(torch.float32, 2, T, -0.1))


def test_same_inputs_give_the_same_bits_again() -> None:
    case = build_case(2, 500, K=64, V=64).cast(torch.bfloat16, "cuda")
    first = case.run(prism_scan_chunked)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, case.run(prism_scan_chunked), strict=True))
