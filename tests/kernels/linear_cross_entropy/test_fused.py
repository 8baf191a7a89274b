"""The Triton form against the definition: loss and gradients, ignored labels, chunks, uninitialised memory."""

import pytest
import torch

from kernels import allocate
from kernels.checks import is_interpreted
from kernels.linear_cross_entropy import fused
from kernels.linear_cross_entropy.fused import linear_cross_entropy
from kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from tests.kernels.compare import assert_relative_error_below

DEVICE = "cpu" if is_interpreted() else "cuda"


def run(operator, reduction: str, *, rows: int, vocab: int, dtype: torch.dtype = torch.float32, size: float = 1.0):
    generator = torch.Generator().manual_seed(rows + vocab)
    hidden = (size * torch.randn(rows, 8, generator=generator)).to(DEVICE, dtype).requires_grad_()
    weight = torch.randn(vocab, 8, generator=generator).to(DEVICE, dtype).requires_grad_()
    labels = torch.randint(0, vocab, (rows,), generator=generator).to(DEVICE)
    labels[::3] = -100
    loss = operator(hidden, weight, labels, reduction=reduction)
    scale = torch.linspace(0.5, 2, loss.numel(), device=DEVICE).view(loss.shape)
    return loss, *torch.autograd.grad((loss * scale).sum(), [hidden, weight])


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 2), (13, 61), (7, 4096), (5, 5000)])
def test_loss_and_gradients_equal_the_definition(rows, vocab, reduction, monkeypatch):
    """Exponentials of logits near 8 and sums of some thousand terms in another order."""

    def allocate_nan(*sizes, like, dtype=None):
        return torch.full(sizes, torch.nan, device=like.device, dtype=dtype or like.dtype)

    monkeypatch.setattr(allocate, "allocate", allocate_nan)
    monkeypatch.setattr(fused, "MAX_CHUNK_LOGITS", 4 * vocab)
    actual, expected = (
        run(operator, reduction, rows=rows, vocab=vocab)
        for operator in (linear_cross_entropy, linear_cross_entropy_reference)
    )
    assert_relative_error_below(2**-17, **{str(i): pair for i, pair in enumerate(zip(actual, expected, strict=True))})


def test_huge_logits_stay_finite():
    actual, expected = (
        run(operator, "none", rows=9, vocab=50, size=1e4)
        for operator in (linear_cross_entropy, linear_cross_entropy_reference)
    )
    assert_relative_error_below(2**-17, **{str(i): pair for i, pair in enumerate(zip(actual, expected, strict=True))})


def test_loss_without_a_graph_computes_no_gradient(monkeypatch):
    monkeypatch.setattr(fused, "_matmul", lambda left, right: left @ right)
    with torch.no_grad():
        loss = linear_cross_entropy(
            torch.ones(2, 4, device=DEVICE), torch.ones(3, 4, device=DEVICE), torch.zeros(2, dtype=int, device=DEVICE)
        )
    assert loss.item() == pytest.approx(2 * torch.tensor(3.0).log().item())


def test_fp64_is_refused_and_the_plain_form_named():
    hidden = torch.ones(2, 4, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match=r"chunked\.py"):
        linear_cross_entropy(hidden, hidden, torch.zeros(2, dtype=int, device=DEVICE))
