"""Parts that the recurrent mixers share. Each owns its parameters and uses them in its own forward only.

Equation numbers are those of arXiv 2602.10796.

Dims: B batch, T tokens, H heads, K key width, V value width, M written pairs, D model width, W conv taps.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.gated_norm.explicit import gated_rms_norm_explicit as gated_rms_norm
from kernels.short_conv.shifted import short_conv_shifted as short_conv
from prism_lm.model.config import ModelConfig

KEY_NORM_EPS = 1e-6
# e^-1000 is zero in fp64 as in fp32: a bound there changes no output and no gradient, and keeps log decays finite.
MIN_LOG_DECAY = -1000.0


def build_linear(in_width: int, out_width: int) -> nn.Linear:
    """A projection without bias, as all of the model's are."""
    return nn.Linear(in_width, out_width, bias=False)


def widen(tensor: Tensor) -> Tensor:
    """The same values in fp32, or in fp64 where they are that already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def normalise(vector_K: Tensor) -> Tensor:
    """L2-normalise the last dim, in fp32 (of keys, eq. 12): the norm is just below 1, and a zero vector stays zero."""
    wide = widen(vector_K)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + KEY_NORM_EPS)).to(vector_K.dtype)


class ShortConv(nn.Module):
    """u (eq. 9): SiLU of a causal depthwise convolution over the last W tokens, restarting at every document."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))

    def forward(
        self, x_BTD: Tensor, document_start_BT: Tensor | None, window_BWD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The activations BTD and the last W - 1 inputs, which carry no gradient."""
        out_BTD, window_BWD = short_conv(x_BTD, self.weight, entry_BWD=window_BWD, document_start_BT=document_start_BT)
        return out_BTD, window_BWD.detach()


class GatedDeltaDecay(nn.Module):
    """log alpha (of eq. 18) = -exp(A_log) softplus(W_a u + dt_bias), one a head, fp32, in [-1000, 0]."""

    def __init__(self, model_width: int, num_heads: int) -> None:
        super().__init__()
        self.projection = build_linear(model_width, num_heads)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))

    def forward(self, u_BTD: Tensor) -> Tensor:
        rate_BTH = functional.softplus(widen(self.projection(u_BTD)) + widen(self.dt_bias))
        return (-widen(self.A_log).exp() * rate_BTH).clamp(min=MIN_LOG_DECAY)


class SigmoidDecay(nn.Module):
    """log alpha (of eq. 18) with alpha = sigmoid(W_a u), one a head, fp32, in [-1000, 0]."""

    def __init__(self, model_width: int, num_heads: int) -> None:
        super().__init__()
        self.projection = build_linear(model_width, num_heads)

    def forward(self, u_BTD: Tensor) -> Tensor:
        return functional.logsigmoid(widen(self.projection(u_BTD))).clamp(min=MIN_LOG_DECAY)


def build_decay(config: ModelConfig) -> nn.Module:
    """The decay that the configuration asks for: u_BTD -> log_decay_BTH."""
    match config.decay:
        case "gated_delta":
            return GatedDeltaDecay(config.model_width, config.num_heads)
        case "sigmoid":
            return SigmoidDecay(config.model_width, config.num_heads)


class StepSizes(nn.Module):
    """b = sigmoid(W_b u) (eq. 11), in [0, 1], one for each written pair and head: u_BTD -> step_size_BTMH in fp32,
    where bf16 would round every b above 0.998 to 1."""

    def __init__(self, model_width: int, write_steps: int, num_heads: int) -> None:
        super().__init__()
        self.projection = build_linear(model_width, write_steps * num_heads)
        self.write_steps, self.num_heads = write_steps, num_heads

    def forward(self, u_BTD: Tensor) -> Tensor:
        step_size = torch.sigmoid(widen(self.projection(u_BTD)))
        return step_size.unflatten(-1, (self.write_steps, self.num_heads))


class GatedNorm(nn.Module):
    """RMS norm of each head's output (algorithm 1), times a weight shared by the heads and SiLU(gate)."""

    def __init__(self, value_width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(value_width))
        self.eps = eps

    def forward(self, x_BTHV: Tensor, gate_BTHV: Tensor) -> Tensor:
        return gated_rms_norm(x_BTHV, gate_BTHV, self.weight, eps=self.eps)
