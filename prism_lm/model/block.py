"""One layer: pre-norm mixer, pre-norm MLP. Dims: B batch, T tokens, D model width."""

import torch
from torch import Tensor, nn

from prism_lm.model.baselines import AttentionMixer, GatedDeltaMixer, LinearAttentionMixer
from prism_lm.model.config import Mixer, ModelConfig
from prism_lm.model.decode_state import LayerState
from prism_lm.model.mixer import PrismMixer
from prism_lm.model.mlp import SwiGLU
from prism_lm.model.operators import Operators


def build_mixer(config: ModelConfig, mixer: Mixer, *, operators: Operators, layer: int = 0) -> nn.Module:
    """The mixer of that name: (x_BTD, document_start_BT, state) -> (out_BTD, new state). `layer`: its place in the
    model."""
    match mixer:
        case "prism":
            return PrismMixer(config, operators=operators)
        case "gated_delta":
            return GatedDeltaMixer(config, operators=operators)
        case "linear_attention":
            return LinearAttentionMixer(config, operators=operators)
        case "ttt":
            from prism_lm.model.ttt import TTTMixer

            return TTTMixer(config, operators=operators)
        case "attention":
            return AttentionMixer(config, operators=operators)
        case "peer":
            from prism_lm.model.peer_mixer import PeerMixer

            return PeerMixer(config, layer=layer)


class AddNorm(nn.Module):
    """x + added, and its RMS norm times a weight."""

    def __init__(self, model_width: int, eps: float, *, operators: Operators) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model_width))
        self.eps = eps
        self.run_add_norm = operators.add_rms_norm

    def forward(self, x_BTD: Tensor, added_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return self.run_add_norm(x_BTD, added_BTD, self.weight, eps=self.eps)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, mixer: Mixer, *, operators: Operators, layer: int = 0) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.model_width, eps=config.norm_eps)
        self.mixer = build_mixer(config, mixer, operators=operators, layer=layer)
        self.mlp_norm = AddNorm(config.model_width, config.norm_eps, operators=operators)
        self.mlp = SwiGLU(config.model_width, config.mlp_width, operators=operators)

    def forward(
        self, x_BTD: Tensor, document_start_BT: Tensor | None, state: LayerState | None
    ) -> tuple[Tensor, LayerState]:
        """The residual stream after this layer, and the layer's state after the last token."""
        mixed_BTD, new_state = self.mixer(self.mixer_norm(x_BTD), document_start_BT, state)
        x_BTD, normed_BTD = self.mlp_norm(x_BTD, mixed_BTD)
        return x_BTD + self.mlp(normed_BTD), new_state
