"""Where each parameter's fp32 master and moments lie on this rank, whatever the ZeRO stage.

DeepSpeed keeps them in flat partitions of its own and says through private attributes which elements of which parameter
are where; this file reads those attributes and no other does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from prism_lm.checkpoint.folder import WEIGHTS_NAME, describe_remedy
from prism_lm.checkpoint.fragments import KINDS, FragmentReader, Kind, Piece
from prism_lm.parallel.mesh import Ranks


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Elements of one parameter that this rank's optimizer updates."""

    piece: Piece
    flat: Tensor
    "The optimizer's own tensor, of which these elements are a part."
    offset: int
    "Where in the flattened `flat` they begin."

    def view(self, kind: Kind, adamw: torch.optim.Optimizer) -> Tensor:
        """The elements themselves, flat; writing to them changes the optimizer's."""
        whole = self.flat if kind == "master" else cast(Tensor, adamw.state[self.flat][kind])
        return whole.detach().view(-1).narrow(0, self.offset, self.piece.numel)

    def take_share(self, ranks: Ranks) -> "Fragment":
        """This rank's part of elements that every rank holds."""
        begin, end = (self.piece.numel * rank // ranks.world_size for rank in (ranks.rank, ranks.rank + 1))
        piece = Piece(name=self.piece.name, start=self.piece.start + begin, numel=end - begin)
        return replace(self, piece=piece, offset=self.offset + begin)


def find_fragments(
    model: nn.Module, inner: Any, adamw: torch.optim.Optimizer, *, stage: int, rank: int
) -> list[Fragment]:
    """Every fragment that this rank updates, in the model's order. With stage 0 that is the whole of each parameter."""
    if stage == 3:
        found = [_find_split(name, parameter, inner, rank) for name, parameter in list_trained(model)]
    elif stage == 0:
        found = [_find_whole(name, parameter) for name, parameter in list_trained(model)]
    else:
        found = [_find_mapped(name, parameter, adamw) for name, parameter in list_trained(model)]
    return [fragment for fragment in found if fragment is not None and fragment.piece.numel]


def list_trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with gradients, a shared one once, under its first name."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def list_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Whole shapes by name, of parameters that stage 3 has split too."""
    return {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in list_trained(model)}


def _find_whole(name: str, parameter: nn.Parameter) -> Fragment:
    """Stage 0: every rank updates every element."""
    return Fragment(piece=Piece(name=name, start=0, numel=parameter.numel()), flat=parameter, offset=0)


def _find_mapped(name: str, parameter: nn.Parameter, adamw: torch.optim.Optimizer) -> Fragment | None:
    """Stages 1 and 2 cut the flattened group, so that a rank has none of some parameters and part of others."""
    held: Any = getattr(parameter, "_hp_mapping", None)
    if held is None:
        return None
    address = held.lp_fragment_address
    return Fragment(
        piece=Piece(name=name, start=int(address.start), numel=int(address.numel)),
        flat=cast(Tensor, adamw.param_groups[held.param_group_index]["params"][0]),
        offset=int(held.hp_fragment_address.start),
    )


def _find_split(name: str, parameter: Any, inner: Any, rank: int) -> Fragment:
    """Stage 3 gives every rank an equal part of every parameter, the last ones padded."""
    optimizer = inner.optimizer
    group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    part, whole = int(parameter.ds_tensor.numel()), int(parameter.ds_numel)
    start = min(whole, part * rank)
    piece = Piece(name=name, start=start, numel=min(part, whole - start))
    return Fragment(piece=piece, flat=optimizer.fp32_partitioned_groups_flat[group], offset=int(offset))


def count_applied_steps(fragments: list[Fragment], adamw: torch.optim.Optimizer) -> int:
    """Updates that AdamW has applied, the same for every parameter; 0 before the first."""
    states = (adamw.state.get(fragment.flat) for fragment in fragments)
    return max((int(state["step"]) for state in states if state), default=0)


def begin_moments(fragments: list[Fragment], adamw: torch.optim.Optimizer, applied_steps: int) -> None:
    """Gives AdamW the state that it would make at its first update, with that many updates counted."""
    for flat in {id(fragment.flat): fragment.flat for fragment in fragments}.values():
        adamw.state[flat] = {
            "step": torch.tensor(float(applied_steps), dtype=torch.float32, device=flat.device),
            "exp_avg": torch.zeros_like(flat, memory_format=torch.preserve_format, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(flat, memory_format=torch.preserve_format, requires_grad=False),
        }


def copy_to_host(fragments: list[Fragment], adamw: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A copy of all state in host memory, by the names that a rank's file has; training may go on meanwhile."""
    if not all(adamw.state.get(fragment.flat) for fragment in fragments):
        begin_moments(fragments, adamw, 0)
    return {
        f"{kind}/{fragment.piece.name}": fragment.view(kind, adamw).to("cpu", copy=True)
        for fragment in fragments
        for kind in KINDS
    }


@torch.no_grad()
def load_fragments(fragments: list[Fragment], adamw: torch.optim.Optimizer, reader: FragmentReader) -> None:
    """Fills masters and moments from a checkpoint, of whatever number of ranks and stage.

    Raises ValueError for one that lacks a parameter.
    """
    begin_moments(fragments, adamw, reader.index.applied_steps)
    for fragment in fragments:
        piece = fragment.piece
        for kind in KINDS:
            fragment.view(kind, adamw).copy_(reader.read(piece.name, kind, piece.start, piece.numel))


@torch.no_grad()
def check_masters(fragments: list[Fragment], adamw: torch.optim.Optimizer, folder: Path) -> None:
    """Raises ValueError for the first parameter whose masters do not round to the checkpoint's weights."""
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS_NAME, framework="pt") as weights:
        for fragment in fragments:
            piece = fragment.piece
            weight = weights.get_tensor(piece.name).view(-1).narrow(0, piece.start, piece.numel)
            if not torch.equal(fragment.view("master", adamw).cpu().to(weight.dtype), weight):
                raise ValueError(
                    f"{folder} must hold one model, but the optimizer's fp32 copy of {piece.name} does not round to "
                    f"its weight in {WEIGHTS_NAME}; {describe_remedy(folder)}"
                )
