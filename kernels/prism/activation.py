"""The solver's activations by name. Loads no torch, so that configurations can name them too."""

from typing import Literal, get_args

Activation = Literal["gelu", "identity"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
