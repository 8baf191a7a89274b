"""What computes a single token of a recurrent model: its states advance where they lie, at one address, as CUDA graphs
want; and where the model runs on Triton kernels, those for one token take the place of several of plain torch.

Nothing of the model changes but within `use`. Dims: B batch, T tokens (one), H heads, V value width, K key width,
W conv taps less one, D conv channels, C logits.
"""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from prism_lm.model.lm import LanguageModel
from prism_lm.model.recurrent_parts import MIN_LOG_DECAY, GatedDeltaDecay, ShortConv, SigmoidDecay, StepSizes
from prism_lm.model.scan import ScanRunner

if TYPE_CHECKING:
    from prism_lm.model.operators import ShortConvolution, Step

_ABSENT = object()
Swap = tuple[Any, str, Any]
"An object, the name of an attribute, and what stands in its place."


class TokenOperators:
    """Those of one model. `use` puts them in place for calls with one token and a state, without document starts."""

    def __init__(self, model: LanguageModel) -> None:
        runners = find_runners(model)
        self._swaps: list[Swap] = [(one, "step", write_step_in_place(one.step)) for one in runners if one.step]
        for module in model.modules():
            if isinstance(module, ShortConv):
                self._swaps.append((module, "run_conv", write_conv_in_place(module.run_conv)))
        if any(_is_kernel(runner.step, "kernels.prism.step", "prism_step") for runner in runners):
            self._swaps += [(module, "forward", form) for module in model.modules() if (form := _find_form(module))]

    @contextmanager
    def use(self) -> Generator[None, None, None]:
        """In the block, the model takes steps by these."""
        before = [(vars(owner), name, vars(owner).get(name, _ABSENT)) for owner, name, _ in self._swaps]
        try:
            for owner, name, replacement in self._swaps:
                vars(owner)[name] = replacement
            yield
        finally:
            for attributes, name, value in before:
                if value is _ABSENT:
                    attributes.pop(name, None)
                else:
                    attributes[name] = value


def find_runners(model: LanguageModel) -> list[ScanRunner]:
    """The scans of the model's recurrent layers."""
    scans = (getattr(module, "run_scan", None) for module in model.modules())
    return [scan for scan in scans if isinstance(scan, ScanRunner)]


def write_step_in_place(step: "Step") -> "Step":
    """The step, its new state written over the old one: by its kernel where that can, by a copy otherwise."""
    is_kernel = _is_kernel(step, "kernels.prism.step", "prism_step")
    call: Callable[..., tuple[Tensor, Tensor]] = step

    def advance(*token: Tensor | None, activation: Any, state_BHVK: Tensor) -> tuple[Tensor, Tensor]:
        if is_kernel:
            return call(*token, activation=activation, state_BHVK=state_BHVK, out_state_BHVK=state_BHVK)
        out_BHV, new_BHVK = call(*token, activation=activation, state_BHVK=state_BHVK)
        return out_BHV, state_BHVK.copy_(new_BHVK)

    return advance


def write_conv_in_place(conv: "ShortConvolution") -> "ShortConvolution":
    """The convolution of a token that follows a window, the new window written over the old one."""
    is_kernel = _is_kernel(conv, "kernels.short_conv.fused", "short_conv")

    def advance(
        x_BTD: Tensor, weight_DW: Tensor, *, entry_BWD: Tensor | None, document_start_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert entry_BWD is not None, "a step follows a state"
        if is_kernel:
            from kernels.short_conv.token import short_conv_token

            return short_conv_token(x_BTD, weight_DW, window_BWD=entry_BWD), entry_BWD
        out_BTD, window_BWD = conv(x_BTD, weight_DW, entry_BWD=entry_BWD, document_start_BT=document_start_BT)
        return out_BTD, entry_BWD.copy_(window_BWD)

    return advance


def _is_kernel(operator: object, module: str, name: str) -> bool:
    """Whether it is that operator of a file of kernels, which is not loaded for this: it would load Triton."""
    return getattr(sys.modules.get(module), name, _ABSENT) is operator


def _find_form(module: object) -> Callable[[Tensor], Tensor] | None:
    """The kernel in the place of a layer of a few scalars; None for any other layer."""
    from kernels.prism.token_scalars import gated_log_decay_token, sigmoid_log_decay_token, step_sizes_token

    def split_heads(size_BTC: Tensor, num_heads: int) -> Tensor:
        return size_BTC.unflatten(-1, (-1, num_heads))

    match module:
        case StepSizes():
            num_heads = module.num_heads
            return lambda logit_BTC: split_heads(step_sizes_token(logit_BTC), num_heads)
        case GatedDeltaDecay():
            return lambda logit_BTH: gated_log_decay_token(
                logit_BTH, module.A_log, module.dt_bias, min_log_decay=MIN_LOG_DECAY
            )
        case SigmoidDecay():
            return lambda logit_BTH: sigmoid_log_decay_token(logit_BTH, min_log_decay=MIN_LOG_DECAY)
        case _:
            return None
