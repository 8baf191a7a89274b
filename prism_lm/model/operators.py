"""The operators a model runs on, as one bundle, and the bundle of plain torch; that of Triton kernels is in
prism_lm/model/kernels.py. Parallelism is put on from outside, by replacing those operators of a bundle that read more
than one token.

Importing this file loads neither torch nor Triton.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear_cross_entropy.reference import Reduction
    from kernels.prism.activation import Activation
    from prism_lm.model.decode_state import AttentionState


class Scan(Protocol):
    """Any form of the PRISM scan: the plain one, a fused kernel, one that passes state between ranks."""

    def __call__(
        self,
        query_BTHK: "Tensor",
        key_BTMHK: "Tensor",
        residual_BTHV: "Tensor",
        gain_BTLHV: "Tensor | None",
        step_size_BTMH: "Tensor",
        log_decay_BTH: "Tensor",
        /,
        *,
        activation: "Activation",
        entry_state_BHVK: "Tensor | None",
        document_start_BT: "Tensor | None",
        chunk_tokens: int,
    ) -> "tuple[Tensor, Tensor]": ...


class Step(Protocol):
    """One token of the scan."""

    def __call__(
        self,
        query_BHK: "Tensor",
        key_BMHK: "Tensor",
        residual_BHV: "Tensor",
        gain_BLHV: "Tensor | None",
        step_size_BMH: "Tensor",
        log_decay_BH: "Tensor",
        /,
        *,
        activation: "Activation",
        state_BHVK: "Tensor",
    ) -> "tuple[Tensor, Tensor]": ...


class ShortConvolution(Protocol):
    """Causal depthwise convolution and SiLU."""

    def __call__(
        self,
        x_BTD: "Tensor",
        weight_DW: "Tensor",
        /,
        *,
        entry_BWD: "Tensor | None",
        document_start_BT: "Tensor | None",
    ) -> "tuple[Tensor, Tensor]": ...


class Attention(Protocol):
    """Causal softmax attention with rotary positions, within documents."""

    def __call__(
        self,
        query_BTHK: "Tensor",
        key_BTHK: "Tensor",
        value_BTHV: "Tensor",
        /,
        *,
        document_start_BT: "Tensor | None",
        state: "AttentionState | None",
        theta: float,
    ) -> "tuple[Tensor, AttentionState]": ...


class GatedRMSNorm(Protocol):
    """RMS norm of the last dim, times a weight and SiLU(gate)."""

    def __call__(self, x: "Tensor", gate: "Tensor", weight_V: "Tensor", /, *, eps: float) -> "Tensor": ...


class UnitKeys(Protocol):
    """The first key and the extra ones in one tensor, each of norm 1."""

    def __call__(self, first_BTHK: "Tensor", extra_BTXHK: "Tensor | None" = None, /) -> "Tensor": ...


class GatedProduct(Protocol):
    """SiLU(gate) * up of gate and up side by side."""

    def __call__(self, gate_up: "Tensor", /) -> "Tensor": ...


class AddRMSNorm(Protocol):
    """A residual addition and the RMS norm of its sum: both of them."""

    def __call__(
        self, x: "Tensor", added: "Tensor", weight_D: "Tensor", /, *, eps: float
    ) -> "tuple[Tensor, Tensor]": ...


class LinearCrossEntropy(Protocol):
    """Cross-entropy of a linear head."""

    def __call__(
        self,
        hidden_ND: "Tensor",
        weight_VD: "Tensor",
        labels_N: "Tensor",
        /,
        *,
        ignore_index: int,
        reduction: "Reduction",
    ) -> "Tensor": ...


@dataclass(frozen=True, kw_only=True)
class Operators:
    """What a model computes besides its linear layers; every form of an operator has one signature."""

    scan: Scan
    step: Step | None
    "None: single tokens take the scan too."
    short_conv: ShortConvolution
    attention: Attention
    gated_rms_norm: GatedRMSNorm
    unit_keys: UnitKeys
    swiglu: GatedProduct
    add_rms_norm: AddRMSNorm
    linear_cross_entropy: LinearCrossEntropy


def build_plain_operators() -> Operators:
    """Plain torch: any device, fp64 to bf16."""
    from kernels.add_norm.reference import add_rms_norm_reference
    from kernels.gated_norm.explicit import gated_rms_norm_explicit
    from kernels.linear_cross_entropy.chunked import linear_cross_entropy
    from kernels.prism.chunk_reference import prism_scan_chunked
    from kernels.prism.step_reference import prism_step_reference
    from kernels.short_conv.shifted import short_conv_shifted
    from kernels.swiglu.reference import swiglu_reference
    from kernels.unit_keys.reference import unit_keys_reference
    from prism_lm.model.attention import causal_attention

    return Operators(
        scan=prism_scan_chunked,
        step=prism_step_reference,
        short_conv=short_conv_shifted,
        attention=causal_attention,
        gated_rms_norm=gated_rms_norm_explicit,
        unit_keys=unit_keys_reference,
        swiglu=swiglu_reference,
        add_rms_norm=add_rms_norm_reference,
        linear_cross_entropy=linear_cross_entropy,
    )
