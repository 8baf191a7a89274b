"""The counted bytes and operations, and the bound they give."""

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


def shape_of(L: int, **sizes: int) -> ScanShape:
    return ScanShape(B=1, T=4096, H=16, L=L, **sizes)


@pytest.mark.parametrize(("L", "forward", "backward"), [(1, 3348, 7204), (2, 5396, 8740), (4, 8468, 11812)])
def test_traffic_is_that_counted_by_hand_for_bf16_heads_of_128(L, forward, backward):
    assert count_forward_bytes(shape_of(L)) == forward
    assert count_backward_bytes(shape_of(L)) == backward


def test_no_solver_moves_what_one_solver_step_moves():
    assert count_forward_bytes(shape_of(0)) == count_forward_bytes(shape_of(1))
    assert count_backward_flops(shape_of(0)) == count_backward_flops(shape_of(1))


def test_fp32_moves_twice_the_bytes_but_for_the_scalars():
    narrow, wide = (count_forward_bytes(shape_of(2, element_bytes=e)) for e in (2, 4))
    assert wide - 20 == 2 * (narrow - 20)


def test_products_of_one_pair_are_the_hand_count():
    K, V, C = 64, 32, 16
    forward = 2 * C * (2 * K + 2 * V) + 2 * C * C / 3 + 3 * 2 * K * V
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
