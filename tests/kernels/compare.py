"""Comparing an operator with its references: one wording of what was wrong and where."""

import torch


def compute_relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`, in fp64; zero against zero is no error."""
    difference = (actual.double() - expected.double()).norm()
    return 0.0 if difference == 0 else (difference / expected.double().norm()).item()


def describe_worst(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Where the two differ most, and by how much."""
    difference = (actual.double() - expected.double()).abs()
    if not difference.numel():
        return "nothing to compare"
    index = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    return f"worst at {index}: {difference.max():.2e}"


def assert_relative_error_below(limit: float, **pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Every named (actual, expected) pair agrees to `limit`, and is finite."""
    for name, (actual, expected) in pairs.items():
        assert actual.shape == expected.shape, f"{name}: {actual.shape} against {expected.shape}"
        assert torch.isfinite(actual).all(), f"{name}: not finite"
        error = compute_relative_error(actual, expected)
        assert error <= limit, f"{name}: relative error {error:.2e} > {limit:.0e}, {describe_worst(actual, expected)}"


def assert_error_at_most_twice(floor: float, **triples: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """For every named (actual, same-dtype reference, fp64 truth): error <= 2 x the reference's + floor."""
    for name, (actual, reference, truth) in triples.items():
        error, allowed = compute_relative_error(actual, truth), compute_relative_error(reference, truth)
        message = f"{name}: relative error {error:.2e}, the reference's {allowed:.2e}, {describe_worst(actual, truth)}"
        assert error <= 2 * allowed + floor, message


def compute_tile_floor(dtype: torch.dtype) -> float:
    """What a kernel that keeps its tiles in `dtype` may add to a reference's error, of relative RMS.

    16 bits: a result passes through about a dozen tiles (inverse, written values, states, scores and their gradients),
    each rounded with an error uniform in eps / 2 to either side, so of RMS eps / sqrt(12); a dozen independent ones
    add up to one eps. fp32: products of three TF32 products drop terms below 2 eps, a dozen of them and as many
    reordered sums.
    """
    return (32 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps


def assert_error_as_derived(
    floor: float, bar: float, **triples: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    """`assert_error_at_most_twice`, and the error is at most `bar` too, except where the reference itself exceeds it:
    there the dtype cannot hold the truth (fp16 underflows)."""
    for name, (actual, reference, truth) in triples.items():
        held = compute_relative_error(reference, truth) <= bar
        assert_relative_error_below(bar if held else float("inf"), **{name: (actual, truth)})
    assert_error_at_most_twice(floor, **triples)
