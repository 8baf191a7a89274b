"""The SwiGLU MLP. Dims: B batch, T tokens, D model width, F inner width."""

from torch import Tensor, nn

from prism_lm.model.operators import Operators
from prism_lm.model.recurrent_parts import build_linear


class SwiGLU(nn.Module):
    """down(SiLU(gate(x)) * up(x)), gate and up side by side in one projection: BTD -> BTD."""

    def __init__(self, model_width: int, mlp_width: int, *, operators: Operators) -> None:
        super().__init__()
        self.gate_up = build_linear(model_width, 2 * mlp_width)
        self.down = build_linear(mlp_width, model_width)
        self.run_product = operators.swiglu

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.run_product(self.gate_up(x_BTD)))
