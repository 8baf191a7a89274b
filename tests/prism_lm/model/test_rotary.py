import torch

from prism_lm.model.rotary import compute_positions, rotate


def test_positions_restart_at_documents_and_continue_a_row():
    start = torch.tensor([[0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    positions = compute_positions(start, torch.tensor([5, 7]), 6)
    assert positions.tolist() == [[5, 6, 0, 1, 0, 1], [7, 8, 9, 10, 11, 12]]


def test_positions_without_documents_count_on():
    assert compute_positions(None, torch.tensor([0, 3]), 3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_rotation_is_multiplication_by_complex_phases():
    x = torch.randn(1, 5, 2, 16, dtype=torch.float64)
    position = torch.tensor([[0, 1, 4, 100, 3000]])
    frequency = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    phase = torch.polar(torch.ones(5, 1, 8, dtype=torch.float64), position[0, :, None, None] * frequency)
    turned = torch.complex(x[..., :8], x[..., 8:]) * phase
    assert torch.allclose(rotate(x, position, 10000.0), torch.cat([turned.real, turned.imag], -1), atol=1e-12)


def test_scores_depend_on_distance_alone():
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    near = rotate(query, torch.tensor([[9]]), 1e4) * rotate(key, torch.tensor([[4]]), 1e4)
    far = rotate(query, torch.tensor([[1005]]), 1e4) * rotate(key, torch.tensor([[1000]]), 1e4)
    assert torch.allclose(near.sum(), far.sum(), atol=1e-11)
