"""Inputs of the convolution, and what is compared of it."""

import torch

RESULTS = ("out", "window", "grad_x", "grad_weight", "grad_entry")


def build_inputs(T, W, D, *, dtype, B=2, device="cpu", start_every=5):
    """x, weight and entry that need gradients, and document starts, about one in `start_every` tokens."""
    generator = torch.Generator(device).manual_seed(T + W)
    sizes = ((B, T, D), (D, W), (B, W - 1, D))
    tensors = [torch.randn(*size, generator=generator, device=device).to(dtype).requires_grad_() for size in sizes]
    return tensors, torch.rand(B, T, generator=generator, device=device) < 1 / start_every


def widen(tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def run(conv, tensors, start):
    """Output, window, and gradients of a loss that both enter; two tensors are x and weight, without an entry."""
    entry_BWD = tensors[2] if len(tensors) == 3 else None
    out, window = conv(tensors[0], tensors[1], entry_BWD=entry_BWD, document_start_BT=start)
    loss = out.double().sin().sum() + window.double().square().sum()
    return [out, window, *torch.autograd.grad(loss, tensors)]


def name_triples(actual, reference, truth):
    return dict(zip(RESULTS, zip(actual, reference, truth, strict=True), strict=False))
