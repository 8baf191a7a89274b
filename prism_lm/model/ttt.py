"""TTT-MLP (arXiv 2407.04620): the state of a head is a two-layer MLP, trained by one gradient step at every token.

    f(x; W) = x + norm(W2 GELU(W1 x)) * weight + bias
    W_t = W_{t-1} - eta_t dl/dW at W_{t-1},  l = ||f(k_t; W) - v_t||^2,  o_t = f(q_t; W_t)

W_0, the layer norm's weight and bias, and what eta_t = sigmoid(W_eta x_t) * 0.1 / K reads are learned. The step's
gradient is written out below, in operations that autograd differentiates once more: gradients flow through all steps.

The slow reference: one token after another in plain torch on any device, in fp32 or wider. A backward pass keeps the
weights of every token, 8 F K numbers a token, head and row at least.

Dims: B batch, T tokens, H heads, K key width, V value width (equal to K), F inner width = 4 K, G = B H, D model width,
Q channels of queries, keys and values side by side.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from prism_lm.model.config import INNER_WIDTH_RATIO, ModelConfig
from prism_lm.model.decode_state import InnerModelState
from prism_lm.model.operators import Operators
from prism_lm.model.recurrent_parts import GatedNorm, ShortConv, StepSizes, build_linear, widen

# The paper's for an MLP; over K, as a step changes what W2 makes of GELU(W1 k) by about K times its size.
BASE_STEP_SIZE = 0.1


class InnerWeights(NamedTuple):
    """What the steps change, of every row and head."""

    first_GFK: Tensor
    second_GVF: Tensor


class InnerNorm(NamedTuple):
    """The layer norm of f, the same at every token."""

    weight_GV: Tensor
    bias_GV: Tensor
    eps: float


class InnerTokens(NamedTuple):
    """What the steps read, token by token."""

    query_TGK: Tensor
    key_TGK: Tensor
    value_TGV: Tensor
    step_size_TG1: Tensor
    document_start_TG: Tensor | None


class InnerModel(nn.Module):
    """Owns W_0 and the layer norm, and takes the steps of a row."""

    def __init__(self, num_heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.num_heads, self.width, self.eps = num_heads, width, eps
        inner_width = INNER_WIDTH_RATIO * width
        self.first_weight = nn.Parameter(torch.empty(num_heads * inner_width, width))
        self.second_weight = nn.Parameter(torch.empty(num_heads * width, inner_width))
        self.norm_weight = nn.Parameter(torch.empty(num_heads * width))
        self.norm_bias = nn.Parameter(torch.empty(num_heads * width))

    def forward(self, tokens: InnerTokens, entry: InnerWeights | None) -> tuple[Tensor, InnerWeights]:
        """Outputs TGV and the weights after the last token; `entry` None begins with W_0."""
        num_rows = tokens.query_TGK.shape[1] // self.num_heads
        first = InnerWeights(self._repeat(self.first_weight, num_rows), self._repeat(self.second_weight, num_rows))
        weight_GV, bias_GV = (self._repeat(vector, num_rows)[:, 0] for vector in (self.norm_weight, self.norm_bias))
        norm = InnerNorm(weight_GV, bias_GV, self.eps)
        return run_inner_steps(tokens, first, first if entry is None else entry, norm)

    def _repeat(self, parameter: Tensor, num_rows: int) -> Tensor:
        """Each head's part, (H, rows, columns), for every row of the batch: (B H, rows, columns)."""
        heads = widen(parameter).unflatten(0, (self.num_heads, -1))
        heads = heads if heads.dim() == 3 else heads[:, None]
        return heads.expand(num_rows, *heads.shape).flatten(0, 1)


class TTTMixer(nn.Module):
    """The inner model between the projections, convolution, gate and norm of the Gated DeltaNet mixer."""

    def __init__(self, config: ModelConfig, *, operators: Operators) -> None:
        super().__init__()
        width_D, width_HV = config.model_width, config.num_heads * config.value_width
        self.num_heads, self.step_scale = config.num_heads, BASE_STEP_SIZE / config.key_width
        self.query_key_value = build_linear(width_D, 3 * width_HV)
        self.conv = ShortConv(3 * width_HV, config.conv_width, operators=operators)
        self.step = build_linear(width_D, config.num_heads)
        self.step_sizes = StepSizes(config.num_heads)
        self.inner = InnerModel(config.num_heads, config.value_width, config.norm_eps)
        self.gate = build_linear(width_D, width_HV)
        self.norm = GatedNorm(config.value_width, config.norm_eps, operators=operators)
        self.output = build_linear(width_HV, width_D)

    def forward(
        self, x_BTD: Tensor, document_start_BT: Tensor | None, state: InnerModelState | None
    ) -> tuple[Tensor, InnerModelState]:
        """The mixed tokens and the state after the last; `state` continues a row, None begins one."""
        window = None if state is None else state.window_BWD
        mixed_BTQ, window = self.conv(self.query_key_value(x_BTD), document_start_BT, window)
        entry = None if state is None else InnerWeights(state.first_BHFK.flatten(0, 1), state.second_BHVF.flatten(0, 1))
        out_TGV, final = self.inner(self._read_tokens(x_BTD, mixed_BTQ, document_start_BT), entry)
        out_BTHV = out_TGV.unflatten(1, (-1, self.num_heads)).transpose(0, 1).to(x_BTD.dtype)
        gate_BTHV = self.gate(x_BTD).unflatten(-1, (self.num_heads, -1))
        first_BHFK, second_BHVF = (weights.detach().unflatten(0, (-1, self.num_heads)) for weights in final)
        out_BTD = self.output(self.norm(out_BTHV, gate_BTHV).flatten(-2))
        return out_BTD, InnerModelState(first_BHFK, second_BHVF, window)

    def _read_tokens(self, x_BTD: Tensor, mixed_BTQ: Tensor, document_start_BT: Tensor | None) -> InnerTokens:
        query, key, value = (self._split_heads(part) for part in widen(mixed_BTQ).chunk(3, dim=-1))
        step_size_BTH1 = self.step_sizes(self.step(x_BTD)).transpose(-1, -2) * self.step_scale
        starts_TG = None
        if document_start_BT is not None:
            starts_TG = document_start_BT.T.repeat_interleave(self.num_heads, dim=1)
        return InnerTokens(query, key, value, step_size_BTH1.transpose(0, 1).flatten(1, 2), starts_TG)

    def _split_heads(self, part_BTQ: Tensor) -> Tensor:
        """(B, T, H K) as (T, B H, K)."""
        return part_BTQ.unflatten(-1, (self.num_heads, -1)).transpose(0, 1).flatten(1, 2)


def apply_inner(weights: InnerWeights, norm: InnerNorm, x_GK: Tensor) -> Tensor:
    """f(x; W), GV."""
    hidden_GF = functional.gelu(_multiply(weights.first_GFK, x_GK))
    normed_GV, _ = _normalise(_multiply(weights.second_GVF, hidden_GF), norm.eps)
    return x_GK + normed_GV * norm.weight_GV + norm.bias_GV


def take_inner_step(
    weights: InnerWeights, norm: InnerNorm, key_GK: Tensor, value_GV: Tensor, step_size_G1: Tensor
) -> InnerWeights:
    """W - eta dl/dW. With z1 = W1 k, h = GELU(z1), z2 = W2 h, n = norm(z2), s the norm's scale, <> means over V:

    dn = 2 (f - v) weight,  dz2 = s (dn - <dn> - n <dn n>),  dW2 = dz2 h^T,  dz1 = GELU'(z1) W2^T dz2,  dW1 = dz1 k^T
    """
    first_GF = _multiply(weights.first_GFK, key_GK)
    hidden_GF = functional.gelu(first_GF)
    normed_GV, scale_G1 = _normalise(_multiply(weights.second_GVF, hidden_GF), norm.eps)
    error_GV = key_GK + normed_GV * norm.weight_GV + norm.bias_GV - value_GV
    grad_GV = 2 * error_GV * norm.weight_GV
    along_G1 = (grad_GV * normed_GV).mean(-1, keepdim=True)
    grad_GV = scale_G1 * (grad_GV - grad_GV.mean(-1, keepdim=True) - normed_GV * along_G1)
    grad_GF = _multiply(weights.second_GVF.mT, grad_GV) * compute_gelu_slope(first_GF)
    return InnerWeights(
        _subtract_outer(weights.first_GFK, step_size_G1 * grad_GF, key_GK),
        _subtract_outer(weights.second_GVF, step_size_G1 * grad_GV, hidden_GF),
    )


def compute_gelu_slope(x: Tensor) -> Tensor:
    """The derivative of the exact GELU, Phi(x) + x phi(x)."""
    density = torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density


def _run_inner_steps(
    tokens: InnerTokens, first: InnerWeights, weights: InnerWeights, norm: InnerNorm
) -> tuple[Tensor, InnerWeights]:
    outs: list[Tensor] = []
    for token in range(len(tokens.query_TGK)):
        if tokens.document_start_TG is not None:
            weights = _restart(weights, first, tokens.document_start_TG[token])
        key_GK, value_GV, step_G1 = tokens.key_TGK[token], tokens.value_TGV[token], tokens.step_size_TG1[token]
        weights = take_inner_step(weights, norm, key_GK, value_GV, step_G1)
        outs.append(apply_inner(weights, norm, tokens.query_TGK[token]))
    return torch.stack(outs), weights


# A compiler would unroll the loop over the row's tokens.
run_inner_steps = cast(
    Callable[[InnerTokens, InnerWeights, InnerWeights, InnerNorm], tuple[Tensor, InnerWeights]],
    torch.compiler.disable(_run_inner_steps),
)


def _restart(weights: InnerWeights, first: InnerWeights, start_G: Tensor) -> InnerWeights:
    """W_0 where a document begins."""
    start_G11 = start_G[:, None, None]
    return InnerWeights(
        torch.where(start_G11, first.first_GFK, weights.first_GFK),
        torch.where(start_G11, first.second_GVF, weights.second_GVF),
    )


def _multiply(matrix_GRC: Tensor, vector_GC: Tensor) -> Tensor:
    return torch.bmm(matrix_GRC, vector_GC[:, :, None])[:, :, 0]


def _subtract_outer(matrix_GRC: Tensor, column_GR: Tensor, row_GC: Tensor) -> Tensor:
    return torch.baddbmm(matrix_GRC, column_GR[:, :, None], row_GC[:, None, :], alpha=-1)


def _normalise(x_GV: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x less its mean over its deviation, and one over that."""
    centred_GV = x_GV - x_GV.mean(-1, keepdim=True)
    scale_G1 = torch.rsqrt(centred_GV.square().mean(-1, keepdim=True) + eps)
    return centred_GV * scale_G1, scale_G1
