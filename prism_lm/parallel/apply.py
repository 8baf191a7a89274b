"""What is put on a model from outside: rows cut over processes, activation checkpointing and compilation."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from prism_lm.model.config import Mixer, ModelConfig
from prism_lm.model.kernels import Kernels
from prism_lm.model.operators import Operators
from prism_lm.parallel.mesh import Ranks, open_sequence_group

if TYPE_CHECKING:
    from torch import nn

WHOLE_ROW_MIXERS: tuple[Mixer, ...] = ("ttt", "peer")
"Mixers that have no form for slices of rows."
_ALIGNED_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is run; nothing here changes what is computed."""

    kernels: Kernels = "auto"
    """Operators of the model: triton, kernels for CUDA devices; plain, torch alone, on any device; auto, triton on CUDA
    and plain elsewhere. A resumed run may change it."""

    sequence_degree: int = 1
    """Processes that share each row, an equal slice of its tokens each: activations take that much less memory. Divides
    the number of processes and data.row_tokens; 1 keeps rows whole. A resumed run may change it."""
    activation_checkpointing: bool = False
    "Keep only each block's input and recompute the block in the backward pass: less memory, about a third more work."
    compile: bool = False
    """Compile each block with torch.compile; the first step takes minutes. Not with train.zero_stage=3; with 1 and 2 a
    weight of one value a head must fill whole 16 bytes, as model.num_heads=8 does in bf16."""

    def __post_init__(self) -> None:
        if self.sequence_degree < 1:
            raise ValueError(f"parallel.sequence_degree={self.sequence_degree} must be at least 1; leave it out")


def check_mixers(model: ModelConfig, sequence_degree: int, *, key: str = "parallel.sequence_degree") -> None:
    """Raises ValueError, under that key, for rows that are to be cut of a model that reads them whole."""
    whole = [mixer for mixer in WHOLE_ROW_MIXERS if mixer in model.layer_mixers()]
    if sequence_degree > 1 and whole:
        raise ValueError(
            f"{key}={sequence_degree} must be 1 for model.mixer={whole[0]}, whose rows cannot be cut over processes; "
            f"use {key}=1"
        )


def apply_to_operators(operators: Operators, ranks: Ranks) -> Operators:
    """Operators for rows cut over a sequence group; the same ones where rows are whole.

    Every process calls it, once the process group is up.
    """
    if ranks.sequence_degree == 1:
        return operators
    from prism_lm.parallel.sequence import shard_operators

    return shard_operators(operators, open_sequence_group(ranks))


def apply_to_blocks(model: "nn.Module", config: ParallelConfig) -> None:
    """Changes how `model.blocks` run, in place; parameter names stay as they are.

    Compilation lies inside checkpointing: what is recomputed is the compiled block.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    for block in find_blocks(model):
        if config.compile:
            block.forward = torch.compile(block.forward)
        if config.activation_checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def check_alignment(model: "nn.Module", *, bytes_each: int) -> None:
    """Raises ValueError for a block's weight that moves those laid behind it off 16 bytes in ZeRO's flat buffers.

    Blocks share one compiled code, which reads weights in pieces of 16 bytes where the first block's lay so, and does
    not look again. bytes_each is the size of a trained weight's element. The model may be on the meta device.
    """
    for block in find_blocks(model):
        for name, parameter in block.named_parameters():
            if parameter.numel() * bytes_each % _ALIGNED_BYTES:
                raise ValueError(
                    f"parallel.compile=true with train.zero_stage=1 or 2 must have weights of a multiple of "
                    f"{_ALIGNED_BYTES // bytes_each} elements, not {name} of shape {tuple(parameter.shape)}; use a "
                    "model.num_heads that is such a multiple, or parallel.compile=false"
                )


def find_blocks(model: "nn.Module") -> "list[nn.Module]":
    """The model's blocks in order. Raises TypeError for a model without a ModuleList `blocks`."""
    from torch import nn

    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise TypeError(f"{type(model).__name__} has no nn.ModuleList `blocks` to apply parallel settings to")
    return list(blocks)
