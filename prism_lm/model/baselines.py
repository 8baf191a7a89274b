"""Gated DeltaNet, linear attention and softmax attention behind the PRISM mixer's forward.

Dims: B batch, T tokens, H heads, K key width, V value width, D model width.
"""

from torch import Tensor, nn

from prism_lm.model.config import ModelConfig
from prism_lm.model.decode_state import AttentionState, RecurrentState
from prism_lm.model.operators import Operators
from prism_lm.model.recurrent_parts import GatedNorm, ShortConv, StepSizes, build_decay, build_linear
from prism_lm.model.scan import ScanInputs, ScanRunner, build_pure_writes


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


class LinearAttentionMixer(nn.Module):
    """Causal linear attention (arXiv 2006.16236): Gated DeltaNet's mixer that neither decays nor forgets nor weighs
    what it writes, S_t = S_{t-1} + v k^T, o = S q / sqrt(K), so that the recurrence alone differs.

    Queries and keys of norm 1 stand for the paper's feature map, and the norm of each head's output for its normaliser:
    a quotient of each token and head, which that norm takes out again.
    """

    def __init__(self, config: ModelConfig, *, operators: Operators) -> None:
        super().__init__()
        width_D, width_HV = config.model_width, config.num_heads * config.value_width
        self.num_heads, self.widths = config.num_heads, _head_widths(config)
        self.query_key_value = build_linear(width_D, sum(self.widths))
        self.conv = ShortConv(sum(self.widths), config.conv_width, operators=operators)
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
        mixed_BTC, window = self.conv(self.query_key_value(x_BTD), document_start_BT, window)
        parts = mixed_BTC.split(self.widths, dim=-1)
        query_BTHK, key_BTHK, value_BTHV = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        query_BTHK, key_BTHK = (self.run_unit_keys(x_BTHK)[:, :, 0] for x_BTHK in (query_BTHK, key_BTHK))
        inputs = build_pure_writes(query_BTHK, key_BTHK, value_BTHV.contiguous())
        out_BTHV, state_BHVK = self.run_scan(inputs, document_start_BT, None if state is None else state.state_BHVK)
        gate_BTHV = self.gate(x_BTD).unflatten(-1, (self.num_heads, -1))
        return self.output(self.norm(out_BTHV, gate_BTHV).flatten(-2)), RecurrentState(state_BHVK, window)


class AttentionMixer(nn.Module):
    """Causal softmax attention with rotary positions; no token sees another document of its row."""

    def __init__(self, config: ModelConfig, *, operators: Operators) -> None:
        super().__init__()
        self.num_heads, self.widths, self.theta = config.num_heads, _head_widths(config), config.rope_theta
        self.query_key_value = build_linear(config.model_width, sum(self.widths))
        self.output = build_linear(self.widths[2], config.model_width)
        self.run_attention = operators.attention

    def forward(
        self, x_BTD: Tensor, document_start_BT: Tensor | None, state: AttentionState | None
    ) -> tuple[Tensor, AttentionState]:
        """The mixed tokens and the cache with theirs added; `state` continues a row, None begins one."""
        parts = self.query_key_value(x_BTD).split(self.widths, dim=-1)
        query_BTHK, key_BTHK, value_BTHV = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        out_BTHV, cache = self.run_attention(
            query_BTHK, key_BTHK, value_BTHV, document_start_BT=document_start_BT, state=state, theta=self.theta
        )
        return self.output(out_BTHV.flatten(-2)), cache
