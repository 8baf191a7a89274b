"""Gated DeltaNet and softmax attention behind the PRISM mixer's forward.

Dims: B batch, T tokens, S keys visible (cached and new), H heads, K key width, V value width, D model width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from prism_lm.model.config import ModelConfig
from prism_lm.model.decode_state import AttentionState, RecurrentState
from prism_lm.model.operators import Operators
from prism_lm.model.recurrent_parts import GatedNorm, ShortConv, StepSizes, build_decay, build_linear
from prism_lm.model.rotary import compute_positions, rotate
from prism_lm.model.scan import ScanInputs, ScanRunner


def _head_widths(config: ModelConfig) -> list[int]:
    """Widths of all heads' queries, keys and values, side by side in one projection."""
    return [config.num_heads * width for width in (config.key_width, config.key_width, config.value_width)]


class GatedDeltaMixer(nn.Module):
    """Gated DeltaNet (arXiv 2412.06464): queries, keys and values each through a short convolution and SiLU, queries
    and keys of norm 1, the gated delta rule, gated RMS norm.

    One depthwise convolution over q|k|v side by side is the three of the paper.
    """

    def __init__(self, config: ModelConfig, *, operators: Operators) -> None:
        super().__init__()
        width_D, width_HV = config.model_width, config.num_heads * config.value_width
        self.num_heads, self.widths = config.num_heads, _head_widths(config)
        self.query_key_value = build_linear(width_D, sum(self.widths))
        self.conv = ShortConv(sum(self.widths), config.conv_width, operators=operators)
        self.step_and_decay = build_linear(width_D, 2 * config.num_heads)
        self.step_sizes = StepSizes(config.num_heads)
        self.decay = build_decay(config)
        self.gate = build_linear(width_D, width_HV)
        self.norm = GatedNorm(config.value_width, config.norm_eps, operators=operators)
        self.output = build_linear(width_HV, width_D)
        self.run_scan = ScanRunner(operators, activation="identity", chunk_tokens=config.chunk_tokens)
        self.run_unit_keys = operators.unit_keys

    def forward(
        self, x_BTD: Tensor, document_start_BT: Tensor | None, state: RecurrentState | None
    ) -> tuple[Tensor, RecurrentState]:
        """The mixed tokens and the state after the last; `state` continues a row, None begins one."""
        window = None if state is None else state.window_BWD
        mixed, window = self.conv(self.query_key_value(x_BTD), document_start_BT, window)
        out_BTHV, state_BHVK = self.run_scan(
            self._read_inputs(x_BTD, mixed), document_start_BT, None if state is None else state.state_BHVK
        )
        gate_BTHV = self.gate(x_BTD).unflatten(-1, (self.num_heads, -1))
        out_BTD = self.output(self.norm(out_BTHV, gate_BTHV).flatten(-2))
        return out_BTD, RecurrentState(state_BHVK, window)

    def _read_inputs(self, x_BTD: Tensor, mixed_BTC: Tensor) -> ScanInputs:
        parts = mixed_BTC.split(self.widths, dim=-1)
        query_BTHK, key_BTHK, value_BTHV = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        step_BTH, decay_BTH = self.step_and_decay(x_BTD).chunk(2, dim=-1)
        return ScanInputs(
            query_BTHK=self.run_unit_keys(query_BTHK)[:, :, 0],
            key_BTMHK=self.run_unit_keys(key_BTHK),
            residual_BTHV=value_BTHV.contiguous(),
            gain_BTLHV=None,
            step_size_BTMH=self.step_sizes(step_BTH),
            log_decay_BTH=self.decay(decay_BTH),
        )


class AttentionMixer(nn.Module):
    """Causal softmax attention with rotary positions; no token sees another document of its row.

    Where document starts are given, a boolean mask of T x S for each row of the batch is made.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.widths, self.theta = config.num_heads, _head_widths(config), config.rope_theta
        self.query_key_value = build_linear(config.model_width, sum(self.widths))
        self.output = build_linear(self.widths[2], config.model_width)

    def forward(
        self, x_BTD: Tensor, document_start_BT: Tensor | None, state: AttentionState | None
    ) -> tuple[Tensor, AttentionState]:
        """The mixed tokens and the cache with theirs added; `state` continues a row, None begins one."""
        parts = self.query_key_value(x_BTD).split(self.widths, dim=-1)
        query_BTHK, key_BTHK, value_BTHV = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        entry_B = x_BTD.new_zeros(x_BTD.shape[0], dtype=torch.int64) if state is None else state.position_B
        position_BT = compute_positions(document_start_BT, entry_B, x_BTD.shape[1])
        query_BTHK = rotate(query_BTHK, position_BT, self.theta)
        key_BTHK = rotate(key_BTHK, position_BT, self.theta)
        document_BT = _number_documents(document_start_BT, state, position_BT)
        cache = _extend(state, key_BTHK, value_BTHV, document_BT, position_BT[:, -1] + 1)
        mask_BTS = None if document_start_BT is None and state is None else _visible(cache, x_BTD.shape[1])
        out_BTHV = _attend(query_BTHK, cache.key_BTHK, cache.value_BTHV, mask_BTS)
        cache = cache._replace(key_BTHK=cache.key_BTHK.detach(), value_BTHV=cache.value_BTHV.detach())
        return self.output(out_BTHV.flatten(-2)), cache


def _number_documents(document_start_BT: Tensor | None, state: AttentionState | None, position_BT: Tensor) -> Tensor:
    """Each new token's document, numbered from 0 within its row."""
    last_B = position_BT.new_zeros(position_BT.shape[0]) if state is None else state.document_BT[:, -1]
    if document_start_BT is None:
        return last_B[:, None].expand_as(position_BT)
    return last_B[:, None] + document_start_BT.cumsum(dim=1)


def _extend(
    state: AttentionState | None, key_BTHK: Tensor, value_BTHV: Tensor, document_BT: Tensor, position_B: Tensor
) -> AttentionState:
    """The cache with the new tokens at its end."""
    if state is None:
        return AttentionState(key_BTHK, value_BTHV, document_BT, position_B)
    return AttentionState(
        torch.cat([state.key_BTHK, key_BTHK], dim=1),
        torch.cat([state.value_BTHV, value_BTHV], dim=1),
        torch.cat([state.document_BT, document_BT], dim=1),
        position_B,
    )


def _visible(cache: AttentionState, num_tokens: int) -> Tensor:
    """Which keys BTS each of the last `num_tokens` tokens may see: not later ones, not another document's."""
    document_BS = cache.document_BT
    same_BTS = document_BS[:, -num_tokens:, None] == document_BS[:, None, :]
    num_keys = document_BS.shape[1]
    causal_TS = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=document_BS.device)
    return same_BTS & causal_TS.tril(num_keys - num_tokens)


def _attend(query_BTHK: Tensor, key_BSHK: Tensor, value_BSHV: Tensor, mask_BTS: Tensor | None) -> Tensor:
    out_BHTV = functional.scaled_dot_product_attention(
        query_BTHK.transpose(1, 2),
        key_BSHK.transpose(1, 2),
        value_BSHV.transpose(1, 2),
        attn_mask=None if mask_BTS is None else mask_BTS[:, None],
        is_causal=mask_BTS is None,
    )
    return out_BHTV.transpose(1, 2)
