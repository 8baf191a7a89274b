"""The counted bytes and operations, and the bound they give."""

import re
from pathlib import Path

import pytest

from kernels.bench.bounds import (
    Ceilings,
    ScanShape,
    count_backward_bytes,
    count_backward_flops,
    count_forward_bytes,
    count_forward_flops,
    count_step_bytes,
)

README = Path(__file__).parents[3] / "kernels" / "README.md"
# What each kernel reads and writes for L = 3, one letter a tensor, tensor after tensor in the order of the README's
# columns: k a key, v a value, t a row of a C x C matrix, s a share of a state.
FORWARD_TENSORS_OF_3 = ("kkk tktt", "v vvv ttt vvv", "kkk k v vv sv", "k kkk v vv s v")
BACKWARD_TENSORS_OF_3 = (
    "k kkk v vv s v vkk ttt tt", "k k k v v sv", "t v vv v v ttt", "kk tt tt v v s vv", "v vvv v vv v vvv",
    "k kkk v vv s s v ttt ttt kkk",
)  # fmt: skip


def shape_of(L: int, **sizes: int) -> ScanShape:
    return ScanShape(B=1, T=4096, H=16, L=L, **sizes)


@pytest.mark.parametrize("L", [1, 2])
def test_traffic_of_bf16_heads_of_128_is_the_sum_of_the_readmes_table(L):
    rows = re.findall(r"^\| `(\w+)_kernel` \|.*\| (\d+) \| (\d+) \|$", README.read_text(encoding="utf-8"), re.M)
    forward = sum(int(row[L]) for row in rows if row[0] in ("solve", "write", "state", "output"))
    assert count_forward_bytes(shape_of(L)) == forward
    assert count_backward_bytes(shape_of(L)) == sum(int(row[L]) for row in rows) - forward


def test_traffic_of_three_steps_is_that_counted_tensor_by_tensor():
    K, V, C = 96, 64, 32
    sizes = {"k": 2 * K, "v": 2 * V, "t": 2 * C, "s": 2 * K * V // C, " ": 0}
    shape = shape_of(3, K=K, V=V, C=C)
    assert count_forward_bytes(shape) == sum(sizes[letter] for letter in "".join(FORWARD_TENSORS_OF_3))
    assert count_backward_bytes(shape) == sum(sizes[letter] for letter in "".join(BACKWARD_TENSORS_OF_3))


def test_no_solver_saves_the_gain_of_one_step_and_its_gradient_but_no_product():
    gain = 2 * 128
    assert count_forward_bytes(shape_of(0)) == count_forward_bytes(shape_of(1)) - gain
    assert count_backward_bytes(shape_of(0)) == count_backward_bytes(shape_of(1)) - 2 * gain
    assert count_backward_flops(shape_of(0)) == count_backward_flops(shape_of(1))


def test_fp32_moves_twice_the_bytes():
    for count in (count_forward_bytes, count_backward_bytes):
        narrow, wide = (count(shape_of(2, element_bytes=e)) for e in (2, 4))
        assert wide == 2 * narrow


def test_products_of_one_pair_are_the_hand_count():
    K, V, C = 64, 32, 16
    forward = 2 * C * (3 * K + 2 * V) + 2 * C * C / 3 + 3 * 2 * K * V
    assert count_forward_flops(ScanShape(B=1, T=1, H=1, L=1, K=K, V=V, C=C)) == pytest.approx(forward)


def test_two_steps_cost_about_half_more_products_than_one():
    one, two = (count_forward_flops(shape_of(L)) + count_backward_flops(shape_of(L)) for L in (1, 2))
    assert 1.4 < two / one < 1.7


def test_step_reads_and_writes_its_state_in_fp32():
    state = 64 * 16 * 128 * 128 * 4
    assert 2 * state < count_step_bytes(64, 16, 128, 128, 2) < 2.05 * state


def test_bound_is_the_slower_of_traffic_and_products():
    ceilings = Ceilings(4e12, 600e12, True)
    assert ceilings.compute_bound_ms(4e9, 0) == pytest.approx(1.0)
    assert ceilings.compute_bound_ms(4e9, 1.2e12) == pytest.approx(2.0)


def test_unknown_gpu_has_no_bound():
    assert Ceilings(4e12, 600e12, False).compute_bound_ms(4e9) is None
