"""What a layer must remember between calls: constant in size for recurrent layers, growing for attention.

States are named tuples so that wrappers that walk over a module's outputs (DeepSpeed's hooks) see their tensors.
Dims: B batch, T cached tokens, H heads, K key width, V value width, F inner model's inner width, W conv taps less one,
D conv channels.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class RecurrentState(NamedTuple):
    """Of a recurrent layer: the fast weights, fp32 or wider, and the last inputs of its convolution, oldest first.
    Its size does not depend on how many tokens were read."""

    state_BHVK: Tensor
    window_BWD: Tensor | None


class AttentionState(NamedTuple):
    """Of an attention layer: every key and value read so far (keys already rotated), the number of the document each
    belongs to within its row, and how many tokens of the current document were read."""

    key_BTHK: Tensor
    value_BTHV: Tensor
    document_BT: Tensor
    position_B: Tensor


class InnerModelState(NamedTuple):
    """Of a TTT layer: both weights of each head's inner model, fp32 or wider, and its convolution's last inputs."""

    first_BHFK: Tensor
    second_BHVF: Tensor
    window_BWD: Tensor


class NoState(NamedTuple):
    """In a LayerState's place, of a layer that cannot go on from what it read: it takes none back."""


LayerState = RecurrentState | AttentionState | InnerModelState


@dataclass(frozen=True, kw_only=True)
class DecodeState:
    """The states of all layers, first layer first."""

    layers: tuple[LayerState, ...]

    def num_bytes(self) -> int:
        """Bytes of every tensor kept, for the whole batch."""
        tensors = [tensor for layer in self.layers for tensor in layer if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
