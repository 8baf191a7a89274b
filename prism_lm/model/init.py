"""Every initial value of the model, each with its reason.

A value depends on the seed and the parameter's name alone: it is the same on any device, for any number of ranks and
whichever other layers exist. Draws are made on the CPU in fp32 and then copied.
"""

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    from prism_lm.model.lm import LanguageModel

DECAY_RATE_RANGE = (1.0, 16.0)
TIME_STEP_RANGE = (1e-3, 1e-1)
RESIDUAL_WRITERS = ("mixer.output.weight", "mlp.down.weight")


@torch.no_grad()
def initialise(model: "LanguageModel", seed: int) -> None:
    """Set every parameter of a whole, materialised model from the seed. Raises ValueError for a name without a rule."""
    of_peers = initialise_peers(model, seed)
    for name, parameter in model.named_parameters():
        if name in of_peers:
            continue
        values = draw_initial_value(name, parameter.shape, num_layers=model.config.num_layers, seed=seed)
        parameter.copy_(values)


def initialise_peers(model: "LanguageModel", seed: int) -> set[str]:
    """Give the mixers from another library that library's own initial values; returns their parameters' names."""
    if "peer" not in model.config.layer_mixers():
        return set()
    from prism_lm.model.peer_mixer import PeerMixer

    names: set[str] = set()
    for owner, module in model.named_modules():
        if isinstance(module, PeerMixer):
            module.initialise(_hash_seed(owner, seed))
            names.update(f"{owner}.{name}" for name, _ in module.named_parameters())
    return names


def draw_initial_value(name: str, shape: torch.Size, *, num_layers: int, seed: int) -> Tensor:
    """The initial fp32 CPU value of the parameter of that name, by its role."""
    generator = _build_generator(name, seed)
    owner, _, leaf = name.rpartition(".")
    match leaf:
        case "A_log":
            return draw_decay_rate(shape, generator)
        case "dt_bias":
            return draw_time_step_bias(shape, generator)
        case "weight" if owner.endswith("norm"):
            return torch.ones(shape)
        case "norm_weight" | "norm_bias" if owner.endswith("mixer.inner"):
            return torch.full(shape, 1.0 if leaf == "norm_weight" else 0.0)
        case "first_weight" | "second_weight" if owner.endswith("mixer.inner"):
            return draw_matrix(shape, generator, scale=1.0)
        case "weight" if owner.endswith(("mixer.anchor", "mixer.conv")):
            return draw_taps(shape, generator)
        case "weight" if len(shape) == 2:
            return draw_matrix(shape, generator, scale=_scale_of(name, num_layers))
        case _:
            raise ValueError(f"parameter {name} must have a rule for its initial value; add one to draw_initial_value")


def draw_matrix(shape: torch.Size, generator: Generator, *, scale: float) -> Tensor:
    """Normal with deviation scale / sqrt(inputs): unit variance in gives variance scale^2 out at any width.

    The embedding counts as a matrix too: rows of length about 1, so that a tied head starts with logits of deviation 1
    (lm.py says what the lookup is multiplied by).
    """
    return torch.empty(shape).normal_(generator=generator) * (scale / math.sqrt(shape[1]))


def draw_taps(shape: torch.Size, generator: Generator) -> Tensor:
    """Uniform with variance 1 / taps: the convolution keeps the variance of what it reads, so that SiLU works where
    it bends and u is as large as the normed input."""
    bound = math.sqrt(3 / shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def draw_decay_rate(shape: torch.Size, generator: Generator) -> Tensor:
    """A_log with exp(A_log) uniform in 1..16, the range of Mamba-2 and Gated DeltaNet: heads differ in their memory."""
    return torch.empty(shape).uniform_(*DECAY_RATE_RANGE, generator=generator).log()


def draw_time_step_bias(shape: torch.Size, generator: Generator) -> Tensor:
    """dt_bias with softplus(dt_bias) log-uniform in 0.001..0.1, the range of Mamba-2 and Gated DeltaNet: with the
    rates above, half-lives from under one token to about 700 tokens."""
    low, high = (math.log(bound) for bound in TIME_STEP_RANGE)
    time_step = torch.empty(shape).uniform_(low, high, generator=generator).exp()
    return time_step + torch.log(-torch.expm1(-time_step))


def _scale_of(name: str, num_layers: int) -> float:
    """1, or 1 / sqrt(2 layers) for what is added to the residual stream, so that its variance stays near 1."""
    return 1 / math.sqrt(2 * num_layers) if name.endswith(RESIDUAL_WRITERS) else 1.0


def _build_generator(name: str, seed: int) -> Generator:
    return torch.Generator().manual_seed(_hash_seed(name, seed))


def _hash_seed(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
