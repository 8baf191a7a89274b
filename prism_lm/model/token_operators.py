"""What computes a single token of a recurrent model: its states advance where they lie, at one address, as CUDA graphs
want.

Nothing of the model changes but within `use`. Dims: B batch, T tokens (one), H heads, V value width, K key width,
W conv taps less one, D conv channels.
"""

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from prism_lm.model.lm import LanguageModel
from prism_lm.model.recurrent_parts import ShortConv
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
    is_kernel = "out_state_BHVK" in inspect.signature(step).parameters
    call: Callable[..., tuple[Tensor, Tensor]] = step

    def advance(*token: Tensor | None, activation: Any, state_BHVK: Tensor) -> tuple[Tensor, Tensor]:
        if is_kernel:
            return call(*token, activation=activation, state_BHVK=state_BHVK, out_state_BHVK=state_BHVK)
        out_BHV, new_BHVK = call(*token, activation=activation, state_BHVK=state_BHVK)
        return out_BHV, state_BHVK.copy_(new_BHVK)

    return advance


def write_conv_in_place(conv: "ShortConvolution") -> "ShortConvolution":
    """The convolution of a token that follows a window, the new window written over the old one."""

    def advance(
        x_BTD: Tensor, weight_DW: Tensor, *, entry_BWD: Tensor | None, document_start_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert entry_BWD is not None, "a step follows a state"
        out_BTD, window_BWD = conv(x_BTD, weight_DW, entry_BWD=entry_BWD, document_start_BT=document_start_BT)
        return out_BTD, entry_BWD.copy_(window_BWD)

    return advance
