"""The scan as the mixers see it, and one call that runs it over a row or advances it by one token.

Dims: B batch, T tokens, H heads, K key width, V value width, L solver steps, M written pairs = max(L, 1).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.prism.activation import Activation
from prism_lm.model.operators import Operators, Step


class ScanInputs(NamedTuple):
    """What a mixer reads off its input for every token (arXiv 2602.10796, eq. 11 to 14 and 18). Keys have norm 1 at
    most; step sizes are in [0, 1] and log decays finite and at most 0, both fp32 or wider. No gains: the residual
    itself is written (L = 0)."""

    query_BTHK: Tensor
    key_BTMHK: Tensor
    residual_BTHV: Tensor
    gain_BTLHV: Tensor | None
    step_size_BTMH: Tensor
    log_decay_BTH: Tensor

    def first_token(self) -> "ScanInputs":
        """The same without the token dim: the inputs of a step."""
        gain = None if self.gain_BTLHV is None else self.gain_BTLHV[:, 0]
        query, key, residual, _, step_size, log_decay = self
        return ScanInputs(query[:, 0], key[:, 0], residual[:, 0], gain, step_size[:, 0], log_decay[:, 0])


def build_pure_writes(query_BTHK: Tensor, key_BTHK: Tensor, value_BTHV: Tensor) -> ScanInputs:
    """Inputs with which a scan of two solver steps and activation identity is S_t = S_{t-1} + v k^T, exactly.

    The first pair, a key and a step size of 0, forgets and writes nothing, and its gain of 0 leaves the residual v to
    the second, which writes all of it. There is no decay.
    """
    (B, T, H, _), wide = query_BTHK.shape, torch.promote_types(query_BTHK.dtype, torch.float32)
    step_size_BTH = query_BTHK.new_ones(B, T, H, dtype=wide)
    return ScanInputs(
        query_BTHK=query_BTHK,
        key_BTMHK=_put_zeros_first(key_BTHK),
        residual_BTHV=value_BTHV,
        gain_BTLHV=_put_zeros_first(torch.ones_like(value_BTHV)),
        step_size_BTMH=_put_zeros_first(step_size_BTH[..., None]).squeeze(-1),
        log_decay_BTH=torch.zeros_like(step_size_BTH),
    )


def _put_zeros_first(second_BTHX: Tensor) -> Tensor:
    """Two pairs (B, T, 2, H, X), the first of zeros."""
    return functional.pad(second_BTHX[:, :, None], (0, 0, 0, 0, 1, 0))


class ScanRunner:
    """A scan (eq. 15 to 18) with its settings. A single token from a known state takes the step where there is one,
    anything else the scan."""

    def __init__(self, operators: Operators, *, activation: Activation, chunk_tokens: int) -> None:
        self.scan, self.step, self.chunk_tokens = operators.scan, operators.step, chunk_tokens
        self.activation: Activation = activation

    def __call__(
        self, inputs: ScanInputs, document_start_BT: Tensor | None, state_BHVK: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Outputs BTHV and the state after the last token; the state carries no gradient."""
        if self.step is not None and state_BHVK is not None and inputs.query_BTHK.shape[1] == 1:
            return self._advance(self.step, inputs, document_start_BT, state_BHVK)
        out_BTHV, final_BHVK = self.scan(
            *inputs,
            activation=self.activation,
            entry_state_BHVK=state_BHVK,
            document_start_BT=document_start_BT,
            chunk_tokens=self.chunk_tokens,
        )
        return out_BTHV, final_BHVK.detach()

    def _advance(
        self, step: Step, inputs: ScanInputs, document_start_BT: Tensor | None, state_BHVK: Tensor
    ) -> tuple[Tensor, Tensor]:
        if document_start_BT is not None:
            state_BHVK = state_BHVK.masked_fill(document_start_BT[:, 0, None, None, None], 0)
        out_BHV, final_BHVK = step(*inputs.first_token(), activation=self.activation, state_BHVK=state_BHVK)
        return out_BHV[:, None], final_BHVK.detach()
