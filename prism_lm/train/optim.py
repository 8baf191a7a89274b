"""AdamW and which parameters decay."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism_lm.model.peer_rules import SPARED_MARK

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019) with decoupled weight decay."""

    learning_rate: float = 3e-4
    "Peak learning rate, reached at the end of the warm-up; above 0."
    beta1: float = 0.9
    "Decay of the first moment, in [0, 1)."
    beta2: float = 0.95
    "Decay of the second moment, in [0, 1)."
    epsilon: float = 1e-8
    "Added to the root of the second moment; above 0."
    weight_decay: float = 0.1
    "Decay of weight matrices; vectors (norms, biases, decay rates) and embedding tables never decay. 0 is off."

    def __post_init__(self) -> None:
        for name, value in (("learning_rate", self.learning_rate), ("epsilon", self.epsilon)):
            if not value > 0.0:
                raise ValueError(f"train.optim.{name}={value} must be above 0; leave it out for the default")
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"train.optim.{name}={value} must lie in [0, 1); leave it out for the default")
        if not self.weight_decay >= 0.0:
            raise ValueError(f"train.optim.weight_decay={self.weight_decay} must be at least 0; use 0 for none")


def split_by_decay(model: "nn.Module") -> "tuple[list[nn.Parameter], list[nn.Parameter]]":
    """(decaying, not decaying) parameters, each once, in the model's order, but those that do not fill whole 16 bytes
    last: ZeRO lays each group out back to back, and a matrix product is slower on weights that lie off such a bound.

    Decay pulls towards 0, which is the neutral value of a matrix that mixes channels but not of a norm's scale, a bias,
    a decay rate or a step-size offset: everything below two dimensions is spared. So is an embedding table, whose rows
    are touched only when their token occurs: decay would shrink rare tokens the most. A tied head is that same table.
    What another library's layer marks as spared is.
    """
    from torch import nn

    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decaying: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and id(parameter) not in tables
            (decaying if decays and not getattr(parameter, SPARED_MARK, False) else spared).append(parameter)
    return sorted(decaying, key=_is_ragged), sorted(spared, key=_is_ragged)


def _is_ragged(parameter: "nn.Parameter") -> bool:
    """Off 16 bytes at the 2 bytes an element of bf16."""
    return parameter.numel() % 8 != 0


def build_adamw(model: "nn.Module", config: OptimConfig) -> "torch.optim.AdamW":
    """AdamW over the model's two groups; an empty group is left out."""
    import torch

    decaying, spared = split_by_decay(model)
    groups = [
        {"params": parameters, "weight_decay": weight_decay}
        for parameters, weight_decay in ((decaying, config.weight_decay), (spared, 0.0))
        if parameters
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True)
