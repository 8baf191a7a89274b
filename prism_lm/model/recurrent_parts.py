"""Parts that the recurrent mixers share. Each owns its parameters and uses them in its own forward only; what the
mixer projects for it comes as an argument.

Equation numbers are those of arXiv 2602.10796.

Dims: B batch, T tokens, H heads, K key width, V value width, M written pairs, D model width, W conv taps.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from prism_lm.model.config import ModelConfig
from prism_lm.model.operators import Operators

# e^-1000 is zero in fp64 as in fp32: a bound there changes no output and no gradient, and keeps log decays finite.
MIN_LOG_DECAY = -1000.0


def build_linear(in_width: int, out_width: int) -> nn.Linear:
    """A projection without bias, as all of the model's are."""
    return nn.Linear(in_width, out_width, bias=False)


def widen(tensor: Tensor) -> Tensor:
    """The same values in fp32, or in fp64 where they are that already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class ShortConv(nn.Module):
    """u (eq. 9): SiLU of a causal depthwise convolution over the last W tokens, restarting at every document."""

    def __init__(self, channels: int, taps: int, *, operators: Operators) -> None:
        super().__init__()
        self.run_conv = operators.short_conv
        self.weight = nn.Parameter(torch.empty(channels, taps))

    def forward(
        self, x_BTD: Tensor, document_start_BT: Tensor | None, window_BWD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The activations BTD and the last W - 1 inputs, which carry no gradient."""
        out_BTD, window_BWD = self.run_conv(
            x_BTD, self.weight, entry_BWD=window_BWD, document_start_BT=document_start_BT
        )
        return out_BTD, window_BWD.detach()


class GatedDeltaDecay(nn.Module):
    """log alpha (of eq. 18) = -exp(A_log) softplus(W_a u + dt_bias), one a head, fp32, in [-1000, 0], from W_a u."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))

    def forward(self, logit_BTH: Tensor) -> Tensor:
        rate_BTH = functional.softplus(widen(logit_BTH) + widen(self.dt_bias))
        return (-widen(self.A_log).exp() * rate_BTH).clamp(min=MIN_LOG_DECAY)


class SigmoidDecay(nn.Module):
    """log alpha (of eq. 18) with alpha = sigmoid(W_a u), one a head, fp32, in [-1000, 0], from W_a u."""

    def forward(self, logit_BTH: Tensor) -> Tensor:
        return functional.logsigmoid(widen(logit_BTH)).clamp(min=MIN_LOG_DECAY)


def build_decay(config: ModelConfig) -> nn.Module:
    """The decay that the configuration asks for: logit_BTH -> log_decay_BTH."""
    match config.decay:
        case "gated_delta":
            return GatedDeltaDecay(config.num_heads)
        case "sigmoid":
            return SigmoidDecay()


class StepSizes(nn.Module):
    """b = sigmoid(W_b u) (eq. 11), in [0, 1], one for each written pair and head, from W_b u: step_size_BTMH in fp32,
    where bf16 would round every b above 0.998 to 1."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, logit_BTC: Tensor) -> Tensor:
        return torch.sigmoid(widen(logit_BTC)).unflatten(-1, (-1, self.num_heads))


class GatedNorm(nn.Module):
    """RMS norm of each head's output (algorithm 1), times a weight shared by the heads and SiLU(gate)."""

    def __init__(self, value_width: int, eps: float, *, operators: Operators) -> None:
        super().__init__()
        self.run_norm = operators.gated_rms_norm
        self.weight = nn.Parameter(torch.empty(value_width))
        self.eps = eps

    def forward(self, x_BTHV: Tensor, gate_BTHV: Tensor) -> Tensor:
        return self.run_norm(x_BTHV, gate_BTHV, self.weight, eps=self.eps)
