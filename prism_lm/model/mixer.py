"""The PRISM mixer (arXiv 2602.10796, algorithm 1): an anchor, a solver of L steps, one exact scan.

From the normed input x, per token: u = SiLU(ShortConv(x)) (eq. 9); q, v, decay, keys, gains and step sizes are
projections of u (eq. 11 to 13); r1 = v - u (eq. 14); the scan runs the loop d_l = f(p_l r_l), r_{l+1} = r_l - d_l
(eq. 15, 16) and writes every d_l (eq. 17, 18). The output gate reads x, as in Gated DeltaNet: SiLU has already
squashed the negative half of u.

One matrix makes every projection of u: u is read once, and its gradient is one product instead of eight and their sum.
Dims: B batch, T tokens, H heads, K key width, V value width, L solver steps, M written pairs, D model width.
"""

import torch
from torch import Tensor, nn

from prism_lm.model.config import ModelConfig, projection_widths
from prism_lm.model.decode_state import RecurrentState
from prism_lm.model.operators import Operators
from prism_lm.model.recurrent_parts import GatedNorm, ShortConv, StepSizes, build_decay, build_linear
from prism_lm.model.scan import ScanInputs, ScanRunner


class SolverProjections(nn.Module):
    """`count` vectors a token (B, T, count, out_width) from what the mixer's matrix gives for them: the vectors
    themselves, or their inner r where the solver is factored D -> r -> D."""

    def __init__(self, out_width: int, *, count: int, rank: int) -> None:
        super().__init__()
        self.count = count
        self.up = nn.ModuleList(build_linear(rank, out_width) for _ in range(count)) if rank else None

    def forward(self, inner_BTC: Tensor) -> Tensor:
        parts = inner_BTC.unflatten(-1, (self.count, -1))
        if self.up is None:
            return parts
        outs = [up(part) for up, part in zip(self.up, parts.unbind(2), strict=True)]
        return outs[0][:, :, None] if self.count == 1 else torch.stack(outs, dim=2)


class PrismMixer(nn.Module):
    """x_BTD -> out_BTD by a rank-L recurrence; every ablation is a switch of the configuration."""

    def __init__(self, config: ModelConfig, *, operators: Operators) -> None:
        super().__init__()
        width_D, width_HK, width_HV = config.model_width, *_head_widths(config)
        has_gains = config.solver_steps > 0 and config.gain == "learned"
        self.num_heads, self.solver_steps = config.num_heads, config.solver_steps
        self.widths = projection_widths(config)
        self.anchor = (
            ShortConv(width_D, config.conv_width, operators=operators) if config.anchor == "shortconv" else None
        )
        self.projection = build_linear(width_D, sum(self.widths.values()))
        self.extra_keys = _build_solver(config, width_HK, config.write_steps - 1)
        self.gains = _build_solver(config, width_HV, config.solver_steps if has_gains else 0)
        self.step_sizes = StepSizes(config.num_heads)
        self.decay = build_decay(config)
        self.gate = build_linear(width_D, width_HV)
        self.norm = GatedNorm(config.value_width, config.norm_eps, operators=operators)
        self.output = build_linear(width_HV, width_D)
        self.run_unit_keys = operators.unit_keys
        self.run_scan = ScanRunner(operators, activation=config.solver_activation, chunk_tokens=config.chunk_tokens)

    def forward(
        self, x_BTD: Tensor, document_start_BT: Tensor | None, state: RecurrentState | None
    ) -> tuple[Tensor, RecurrentState]:
        """The mixed tokens and the state after the last; `state` continues a row, None begins one."""
        u_BTD, window = self._read_anchor(x_BTD, document_start_BT, state)
        out_BTHV, state_BHVK = self.run_scan(
            self._read_inputs(u_BTD), document_start_BT, None if state is None else state.state_BHVK
        )
        gate_BTHV = self._split_heads(self.gate(x_BTD))
        out_BTD = self.output(self.norm(out_BTHV, gate_BTHV).flatten(-2))
        return out_BTD, RecurrentState(state_BHVK, window)

    def _read_anchor(
        self, x_BTD: Tensor, document_start_BT: Tensor | None, state: RecurrentState | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.anchor is None:
            return x_BTD, None
        return self.anchor(x_BTD, document_start_BT, None if state is None else state.window_BWD)

    def _read_inputs(self, u_BTD: Tensor) -> ScanInputs:
        parts = self.projection(u_BTD).split(list(self.widths.values()), dim=-1)
        part = dict(zip(self.widths, parts, strict=True))
        extra = None if self.extra_keys is None else self._split_heads(self.extra_keys(part["extra_keys"]))
        return ScanInputs(
            query_BTHK=self._split_heads(part["query"]),
            key_BTMHK=self.run_unit_keys(self._split_heads(part["first_key"]), extra),
            residual_BTHV=self._split_heads(self._read_residual(part, u_BTD)),
            gain_BTLHV=self._read_gains(part),
            step_size_BTMH=self.step_sizes(part["step_sizes"]),
            log_decay_BTH=self.decay(part["decay"]),
        )

    def _read_residual(self, part: dict[str, Tensor], u_BTD: Tensor) -> Tensor:
        """r1 = v - u (eq. 14), u cut in heads where the widths agree and projected where not; v without a solver."""
        if not self.solver_steps:
            return part["value"]
        return part["value"] - (part["anchor"] if self.widths["anchor"] else u_BTD)

    def _read_gains(self, part: dict[str, Tensor]) -> Tensor | None:
        """The solver's gains p (eq. 13), learned or all ones."""
        if not self.solver_steps:
            return None
        if self.gains is not None:
            return self._split_heads(self.gains(part["gains"]))
        value_BTHV = self._split_heads(part["value"])
        B, T, H, V = value_BTHV.shape
        return value_BTHV.new_ones(B, T, self.solver_steps, H, V)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))


def _head_widths(config: ModelConfig) -> tuple[int, int]:
    return config.num_heads * config.key_width, config.num_heads * config.value_width


def _build_solver(config: ModelConfig, out_width: int, count: int) -> SolverProjections | None:
    return SolverProjections(out_width, count=count, rank=config.solver_rank) if count else None
