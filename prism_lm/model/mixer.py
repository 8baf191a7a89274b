"""The PRISM mixer (arXiv 2602.10796, algorithm 1): an anchor, a solver of L steps, one exact scan.

From the normed input x, per token: u = SiLU(ShortConv(x)) (eq. 9); q, v, decay, keys, gains and step sizes are
projections of u (eq. 11 to 13); r1 = v - u (eq. 14); the scan runs the loop d_l = f(p_l r_l), r_{l+1} = r_l - d_l
(eq. 15, 16) and writes every d_l (eq. 17, 18). The output gate reads x, as in Gated DeltaNet: SiLU has already
squashed the negative half of u.
Dims: B batch, T tokens, H heads, K key width, V value width, L solver steps, M written pairs, D model width.
"""

import torch
from torch import Tensor, nn

from prism_lm.model.config import ModelConfig
from prism_lm.model.decode_state import RecurrentState
from prism_lm.model.recurrent_parts import GatedNorm, ShortConv, StepSizes, build_decay, build_linear, normalise
from prism_lm.model.scan import Scan, ScanInputs, ScanRunner


class SolverProjection(nn.Module):
    """`count` projections of u at once, full rank or factored D -> r -> D: u_BTD -> B, T, count, out_width."""

    def __init__(self, model_width: int, out_width: int, *, count: int, rank: int) -> None:
        super().__init__()
        self.count, self.rank = count, rank
        self.down = build_linear(model_width, count * rank) if rank else None
        self.up = nn.ModuleList(build_linear(rank, out_width) for _ in range(count)) if rank else None
        self.full = None if rank else build_linear(model_width, count * out_width)

    def forward(self, u_BTD: Tensor) -> Tensor:
        if self.full is not None:
            return self.full(u_BTD).unflatten(-1, (self.count, -1))
        assert self.down is not None and self.up is not None
        parts = self.down(u_BTD).split(self.rank, dim=-1)
        return torch.stack([up(part) for up, part in zip(self.up, parts, strict=True)], dim=2)


class Keys(nn.Module):
    """The M write keys of norm 1 (eq. 12), the first from a full projection, the others from the solver's:
    u_BTD -> key_BTMHK."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, num_extra = config.num_heads * config.key_width, config.write_steps - 1
        self.num_heads = config.num_heads
        self.first = build_linear(config.model_width, width)
        self.extra = (
            SolverProjection(config.model_width, width, count=num_extra, rank=config.solver_rank) if num_extra else None
        )

    def forward(self, u_BTD: Tensor) -> Tensor:
        key = self.first(u_BTD)[:, :, None]
        if self.extra is not None:
            key = torch.cat([key, self.extra(u_BTD)], dim=2)
        return normalise(key.unflatten(-1, (self.num_heads, -1)))


class Gains(nn.Module):
    """The solver's gains p (eq. 13), learned or all ones: u_BTD -> gain_BTLHV."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.shape_LHV = (config.solver_steps, config.num_heads, config.value_width)
        width, count = config.num_heads * config.value_width, config.solver_steps
        self.projection = (
            SolverProjection(config.model_width, width, count=count, rank=config.solver_rank)
            if config.gain == "learned"
            else None
        )

    def forward(self, u_BTD: Tensor) -> Tensor:
        if self.projection is None:
            return u_BTD.new_ones(*u_BTD.shape[:2], *self.shape_LHV)
        return self.projection(u_BTD).unflatten(-1, self.shape_LHV[1:])


class FirstResidual(nn.Module):
    """r1 = v - u (eq. 14), u cut in heads where the widths agree and projected where not: BTD, BTHV -> BTHV."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.num_heads * config.value_width
        self.projection = None if width == config.model_width else build_linear(config.model_width, width)

    def forward(self, u_BTD: Tensor, value_BTHV: Tensor) -> Tensor:
        anchor = u_BTD if self.projection is None else self.projection(u_BTD)
        return value_BTHV - anchor.view_as(value_BTHV)


class PrismMixer(nn.Module):
    """x_BTD -> out_BTD by a rank-L recurrence; every ablation is a switch of the configuration.

    `scan` is any function with the scan's signature, so that parallelism is put on from outside.
    """

    def __init__(self, config: ModelConfig, *, scan: Scan) -> None:
        super().__init__()
        width_D, width_HV = config.model_width, config.num_heads * config.value_width
        has_solver = config.solver_steps > 0
        self.num_heads = config.num_heads
        self.anchor = ShortConv(width_D, config.conv_width) if config.anchor == "shortconv" else None
        self.query = build_linear(width_D, config.num_heads * config.key_width)
        self.value = build_linear(width_D, width_HV)
        self.keys = Keys(config)
        self.gains = Gains(config) if has_solver else None
        self.residual = FirstResidual(config) if has_solver else None
        self.step_sizes = StepSizes(width_D, config.write_steps, config.num_heads)
        self.decay = build_decay(config)
        self.gate = build_linear(width_D, width_HV)
        self.norm = GatedNorm(config.value_width, config.norm_eps)
        self.output = build_linear(width_HV, width_D)
        self.run_scan = ScanRunner(scan, activation=config.solver_activation, chunk_tokens=config.chunk_tokens)

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
        value_BTHV = self._split_heads(self.value(u_BTD))
        return ScanInputs(
            query_BTHK=self._split_heads(self.query(u_BTD)),
            key_BTMHK=self.keys(u_BTD),
            residual_BTHV=value_BTHV if self.residual is None else self.residual(u_BTD, value_BTHV),
            gain_BTLHV=None if self.gains is None else self.gains(u_BTD),
            step_size_BTMH=self.step_sizes(u_BTD),
            log_decay_BTH=self.decay(u_BTD),
        )

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))
