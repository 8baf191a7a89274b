"""Both chunked forms against whole logits: torch's operator where it exists, and our own everywhere."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.linear_cross_entropy import chunked
from kernels.linear_cross_entropy.chunked import linear_cross_entropy
from kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from tests.kernels.compare import assert_error_at_most_twice, assert_relative_error_below

FORMS = ["torch", "own"] if chunked.has_torch_operator() else ["own"]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Runs a test with each form, and with chunks of few rows."""
    monkeypatch.setattr(chunked, "MAX_CHUNK_LOGITS_CPU", 32 * 16)
    if request.param == "own":
        monkeypatch.setattr(chunked, "has_torch_operator", lambda: False)


def build_inputs(dtype=torch.float64, N=70, D=8, V=32):
    generator = torch.Generator().manual_seed(N)
    hidden, weight = (torch.randn(n, D, generator=generator, dtype=torch.float64).to(dtype) for n in (N, V))
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[::7] = -100
    return [hidden.requires_grad_(), weight.requires_grad_()], labels


def run(loss_function, tensors, labels, reduction="sum"):
    loss = loss_function(*tensors, labels, reduction=reduction)
    scale = torch.linspace(0.5, 2, len(labels), dtype=torch.float64) if reduction == "none" else 3.0
    return [loss, *torch.autograd.grad((loss.double() * scale).sum(), tensors)]


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("N", [1, 16, 17, 70])
def test_loss_and_gradients_equal_whole_logits(form, N, reduction):
    tensors, labels = build_inputs(N=N)
    labels[0] = 5
    actual = run(linear_cross_entropy, tensors, labels, reduction)
    expected = run(linear_cross_entropy_reference, tensors, labels, reduction)
    for name, a, b in zip(("loss", "grad_hidden", "grad_weight"), actual, expected, strict=True):
        assert_relative_error_below(1e-13, **{name: (a, b)})


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_error_is_the_whole_logits(form, dtype, reduction):
    """Loss in fp32 whatever the inputs; the floor is ten fp32 roundings of reordered sums."""
    tensors, labels = build_inputs(dtype)
    truth = run(
        linear_cross_entropy_reference, [x.detach().double().requires_grad_() for x in tensors], labels, reduction
    )
    reference = run(linear_cross_entropy_reference, tensors, labels, reduction)
    actual = run(linear_cross_entropy, tensors, labels, reduction)
    triples = dict(zip(("loss", "hidden", "weight"), zip(actual, reference, truth, strict=True), strict=True))
    assert actual[0].dtype == torch.float32
    # A sum's gradient is rounded to the inputs' dtype before and after the upstream factor.
    assert_error_at_most_twice(10 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps / 2, **triples)


def test_large_logits_do_not_overflow(form):
    tensors, labels = build_inputs(torch.float32)
    large = [(x.detach() * 100).requires_grad_() for x in tensors]
    for result in run(linear_cross_entropy, large, labels):
        assert torch.isfinite(result).all()


def test_rows_without_labels_cost_nothing_and_move_nothing(form):
    tensors, labels = build_inputs()
    for result in run(linear_cross_entropy, tensors, torch.full_like(labels, -100)):
        assert (result == 0).all()


def test_loss_without_gradients_equals_loss_with(form):
    tensors, labels = build_inputs()
    expected = linear_cross_entropy(*tensors, labels)
    with torch.no_grad():
        actual = linear_cross_entropy(*tensors, labels)
    assert_relative_error_below(1e-14, loss=(actual, expected))


def test_other_ignore_index_is_honoured(form):
    tensors, labels = build_inputs()
    expected = linear_cross_entropy(*tensors, labels)
    moved = torch.where(labels == -100, -1, labels)
    assert_relative_error_below(1e-14, loss=(linear_cross_entropy(*tensors, moved, ignore_index=-1), expected))


class _LargestTensor(TorchDispatchMode):
    """Records the largest number of elements any operation returned."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_logits_are_never_whole(form, reduction):
    tensors, labels = build_inputs(torch.float32, N=256, D=8, V=64)
    with _LargestTensor() as largest:
        run(linear_cross_entropy, tensors, labels, reduction)
    assert 0 < largest.num_elements <= 256 * 64 / 4


def test_weight_may_be_released_between_forward_and_backward(form):
    """A partitioned parameter has no data when the backward of a sum runs."""
    tensors, labels = build_inputs()
    expected = run(linear_cross_entropy, tensors, labels)
    loss = linear_cross_entropy(*tensors, labels)
    whole = tensors[1].data
    tensors[1].data = whole.clone().fill_(torch.nan)
    grads = torch.autograd.grad(3.0 * loss, tensors)
    assert_relative_error_below(1e-14, hidden=(grads[0], expected[1]), weight=(grads[1], expected[2]))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_compiled_loss_equals_eager(reduction):
    tensors, labels = build_inputs(torch.float32)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    actual = run(compiled, tensors, labels, reduction)
    for a, b in zip(actual, run(linear_cross_entropy, tensors, labels, reduction), strict=True):
        assert_relative_error_below(1e-6, result=(a, b))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_own_gradients_pass_gradcheck(reduction):
    tensors, labels = build_inputs(N=5, D=2, V=4)
    form = chunked._RowLoss.apply if reduction == "none" else lambda *a: chunked._SumLoss.apply(*a, True)
    assert torch.autograd.gradcheck(lambda hidden, weight: form(hidden, weight, labels, -100), tensors)
