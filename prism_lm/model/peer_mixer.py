"""A layer of flash-linear-attention behind the PRISM mixer's forward, for comparisons in our own trainer.

It reads whole rows: it neither takes a state nor leaves one. The package is imported when a layer is built; its kernels
need a CUDA device.

Dims: B batch, T tokens, D model width, N documents, S tokens of all rows laid end to end.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from prism_lm.model.config import ModelConfig
from prism_lm.model.decode_state import LayerState, NoState
from prism_lm.model.peer_rules import SPARED_MARK, check_peer_installed, fill_arguments, spell_choices

BOUNDARIES = "cu_seqlens"
"The package's name for where documents begin in one row, and where the last one ends: N + 1 places."

_found: Any = WeakTensorKeyDictionary()
"Of document starts that are still in use: their version and their boundaries, which all layers share."


class PeerMixer(nn.Module):
    """Any layer of fla.layers that reads hidden_states (B, T, D) causally.

    Documents are told apart by cu_seqlens where the layer's forward knows it, else by reading each by itself.
    """

    def __init__(self, config: ModelConfig, *, layer: int) -> None:
        super().__init__()
        self._build = partial(build_peer_layer, config, layer=layer)
        self.peer = self._build()
        self.takes_boundaries = takes_boundaries(self.peer)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Give every parameter and buffer the value that the layer's own constructor draws, in fp32 on the CPU, from
        `seed`, and its mark against decay, which moving off meta takes. The process's generators stay as they are."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            fresh = self._build()
        drawn = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
        for name, tensor in [*self.peer.named_parameters(), *self.peer.named_buffers()]:
            tensor.copy_(drawn[name])
            if getattr(drawn[name], SPARED_MARK, False):
                setattr(tensor, SPARED_MARK, True)

    @torch.compiler.disable
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_BTD: Tensor, document_start_BT: Tensor | None, state: LayerState | None
    ) -> tuple[Tensor, NoState]:
        """The mixed tokens. Raises ValueError for a state to go on from."""
        if state is not None:
            raise ValueError(
                "model.mixer=peer must read whole rows and cannot go on from a state; decode with another mixer"
            )
        if document_start_BT is None:
            return self._run(x_BTD), NoState()
        boundaries = find_boundaries(document_start_BT)
        if not self.takes_boundaries:
            return run_apart(self._run, x_BTD, boundaries), NoState()
        out_1SD = self._run(x_BTD.reshape(1, -1, x_BTD.shape[-1]), boundaries)
        return out_1SD.view_as(x_BTD), NoState()

    def _run(self, x_BTD: Tensor, boundaries: Tensor | None = None) -> Tensor:
        keywords = {} if boundaries is None else {BOUNDARIES: boundaries}
        out = self.peer(hidden_states=x_BTD, **keywords)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)


def build_peer_layer(config: ModelConfig, *, layer: int) -> nn.Module:
    """The layer that the configuration asks for, its place in the model `layer`, on torch's default device.

    Raises ValueError where the package is absent or unusable, for an unknown layer, and for what its constructor
    refuses.
    """
    layer_class = find_peer_class(config)
    arguments = fill_arguments(config, list_arguments(layer_class), layer=layer)
    try:
        return layer_class(**arguments)
    except Exception as error:
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"model.peer_layer={config.peer_layer} must take what it is given, {given}, but refuses it ({reason}); "
            "change model.peer_options or the model's widths"
        ) from error


def find_peer_class(config: ModelConfig) -> Callable[..., nn.Module]:
    """The class of fla.layers that is named. Raises ValueError where there is none."""
    check_peer_installed(config)
    try:
        layers = importlib.import_module("fla.layers")
    except ImportError as error:
        raise ValueError(
            f"model.mixer=peer must be able to import fla.layers ({' '.join(str(error).split())}); "
            "pip install -e '.[peers]'"
        ) from error
    known = {
        name: item for name, item in vars(layers).items() if isinstance(item, type) and issubclass(item, nn.Module)
    }
    if config.peer_layer not in known:
        raise ValueError(
            f"model.peer_layer={config.peer_layer} must be a layer of flash-linear-attention; "
            f"use {spell_choices(config.peer_layer, known)}"
        )
    return known[config.peer_layer]


def list_arguments(layer_class: Callable[..., nn.Module]) -> list[str]:
    """Names that a constructor takes; what it swallows unseen is not among them."""
    parameters = inspect.signature(layer_class).parameters.values()
    swallowing = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [parameter.name for parameter in parameters if parameter.kind not in swallowing]


def takes_boundaries(layer: nn.Module) -> bool:
    """Whether a layer's forward names cu_seqlens, as an argument or as a keyword that it looks up.

    One that does not would take the keyword and let documents run into one another.
    """
    return BOUNDARIES in _list_names(inspect.unwrap(type(layer).forward).__code__)


def _list_names(code: CodeType) -> set[str]:
    """Variables, keywords and texts of a function, those inside of it included."""
    names = {*code.co_varnames, *code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _list_names(constant)
        elif isinstance(constant, str):
            names.add(constant)
        elif isinstance(constant, tuple):
            names.update(item for item in cast(tuple[object, ...], constant) if isinstance(item, str))
    return names


def find_boundaries(document_start_BT: Tensor) -> Tensor:
    """Where documents begin in the rows laid end to end, and where the last ends: int64 N + 1, rising from 0. A row
    begins a document of its own. The same tensor, unchanged, has the same answer: finding it makes the host wait."""
    version = document_start_BT._version  # pyright: ignore[reportPrivateUsage]
    held = _found.get(document_start_BT)
    if held is not None and held[0] == version:
        return held[1]
    starts_BT = document_start_BT.clone()
    starts_BT[:, 0] = True
    begins_N = starts_BT.flatten().nonzero().flatten()
    boundaries = torch.cat([begins_N, begins_N.new_tensor([starts_BT.numel()])])
    _found[document_start_BT] = version, boundaries
    return boundaries


def run_apart(run: Callable[[Tensor], Tensor], x_BTD: Tensor, boundaries: Tensor) -> Tensor:
    """Each document as a row of its own, those of a like length together. A row's end is filled up behind its document,
    where a causal layer cannot see it from within."""
    x_SD = x_BTD.flatten(0, 1)
    begin_N, length_N = boundaries[:-1], boundaries.diff()
    groups: dict[int, list[int]] = {}
    for document, length in enumerate(length_N.tolist()):
        groups.setdefault((length - 1).bit_length(), []).append(document)
    outs: list[Tensor] = []
    places: list[Tensor] = []
    for documents in groups.values():
        begin_N1, length_N1 = begin_N[documents][:, None], length_N[documents][:, None]
        step_T = torch.arange(int(length_N1.max()), device=x_SD.device)
        place_NT = begin_N1 + torch.minimum(step_T, length_N1 - 1)
        is_text_NT = step_T < length_N1
        outs.append(run(x_SD[place_NT])[is_text_NT])
        places.append(place_NT[is_text_NT])
    return torch.cat(outs)[torch.cat(places).argsort()].view_as(x_BTD)


def count_peer_parameters(config: ModelConfig) -> tuple[int, int]:
    """Numbers in the first layer's parameters of two and more dims, and in its vectors; built without memory."""
    with torch.device("meta"):
        parameters = list(build_peer_layer(config, layer=0).parameters())
    whole = sum(parameter.numel() for parameter in parameters)
    vectors = sum(parameter.numel() for parameter in parameters if parameter.ndim < 2)
    return whole - vectors, vectors
