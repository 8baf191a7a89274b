"""A stand-in for fla.layers: small causal layers of torch alone with that package's calling convention."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from prism_lm.model.config import ModelConfig

SIZES: dict[str, Any] = {"model_width": 32, "num_layers": 2, "num_heads": 2, "key_width": 16, "value_width": 16}
REST: dict[str, Any] = {"vocab_size": 64, "mlp_width": 48, "solver_rank": 8, "chunk_tokens": 16}


def build_peer_config(layer: str = "FakeDelta", **settings: Any) -> ModelConfig:
    """A small model of that layer."""
    return ModelConfig(**{**SIZES, **REST, "mixer": "peer", "peer_layer": layer, **settings})


class _Summing(nn.Module):
    """Every token is given the sum of what its document held before it and of itself, as decayed."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.rand(inner, 1).log())
        self.A_log._no_weight_decay = True
        self.value_proj = nn.Linear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=True)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def sum_up_documents(self, x_1SD: Tensor, boundaries: Tensor | None) -> Tensor:
        if boundaries is None:
            return self.sum_up(x_1SD)
        assert x_1SD.shape[0] == 1 and boundaries.dtype == torch.int64
        return torch.cat([self.sum_up(part) for part in x_1SD.split(boundaries.diff().tolist(), dim=1)], 1)

    def sum_up(self, x_BTD: Tensor) -> Tensor:
        value_BTV, decay_V = self.value_proj(x_BTD), torch.sigmoid(self.A_log[:, 0])
        held_BV, outs = torch.zeros_like(value_BTV[:, 0]), []
        for token_BV in value_BTV.unbind(1):
            held_BV = decay_V * held_BV + token_BV
            outs.append(held_BV)
        return self.o_proj(torch.stack(outs, 1)) * self.scale


class FakeDelta(_Summing):
    """Knows cu_seqlens as a keyword that it looks up, and counts heads by head_dim."""

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        mode: str = "chunk",
        num_householder: int = 1,
        use_forget_gate: bool = True,
        layer_idx: int | None = None,
        **unseen: Any,
    ) -> None:
        assert num_householder > 0, "num_householder must be positive"
        super().__init__(hidden_size, int(num_heads * head_dim * expand_v) * num_householder)
        self.given = (hidden_size, expand_v, head_dim, num_heads, mode, num_householder, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **keywords: Any,
    ) -> tuple[Tensor, None, None]:
        return self.sum_up_documents(hidden_states, keywords.get("cu_seqlens")), None, None


class FakeStateSpace(_Summing):
    """Knows nothing of documents, and has a state size beside its head's width."""

    def __init__(
        self,
        num_heads: int | None = None,
        head_dim: int = 64,
        hidden_size: int = 2048,
        state_size: int = 128,
        expand: int = 2,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(hidden_size, hidden_size * expand)
        self.given = (num_heads, head_dim, hidden_size, state_size, expand, layer_idx)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **keywords: Any) -> Tensor:
        return self.sum_up(hidden_states)


class FakeLinear(_Summing):
    """Counts keys and values in model widths."""

    def __init__(self, mode: str = "fused", hidden_size: int = 1024, expand_k: float = 0.5, expand_v: float = 1.0):
        super().__init__(hidden_size, int(hidden_size * expand_v))
        self.given = (mode, hidden_size, expand_k, expand_v)

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, None]:
        return self.sum_up_documents(hidden_states, cu_seqlens), None


@contextmanager
def fake_peers(others: Mapping[str, type[nn.Module]] | None = None) -> Iterator[None]:
    """fla.layers is this file's for the time of the block, and holds those of other names besides."""
    package, layers = ModuleType("fla"), ModuleType("fla.layers")
    package.__spec__, layers.__spec__ = ModuleSpec("fla", None), ModuleSpec("fla.layers", None)
    known = {layer.__name__: layer for layer in (FakeDelta, FakeStateSpace, FakeLinear)}
    for name, layer in {**known, **(others or {})}.items():
        setattr(layers, name, layer)
    package.layers = layers
    with mock.patch.dict(sys.modules, {"fla": package, "fla.layers": layers}):
        yield
