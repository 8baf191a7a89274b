"""A block on Triton kernels against the same block in plain torch on a CUDA device: eager, compiled, checkpointed."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from prism_lm.model.block import Block
from prism_lm.model.config import ModelConfig
from prism_lm.model.kernels import build_triton_operators, select_operators
from prism_lm.model.lm import build_model
from prism_lm.model.operators import build_plain_operators
from tests.prism_lm.model.builders import SMALL, build_rows, build_small, relative_error

pytestmark = pytest.mark.gpu

WIDE = replace(SMALL, model_width=256, num_heads=4, key_width=64, value_width=64, mlp_width=336, solver_rank=32)
CONFIGS = {
    "small": SMALL,
    "wide": WIDE,
    "four_steps": replace(WIDE, solver_steps=4),
    "no_solver": replace(WIDE, solver_steps=0),
    "gated_delta": replace(WIDE, mixer="gated_delta"),
}
ROWS, TOKENS, STARTS = 2, 300, ((0, 13), (1, 64), (1, 65), (1, 200))
WAYS = {
    "eager": lambda block: block.forward,
    "compiled": lambda block: torch.compile(block.forward, fullgraph=True),
    "checkpointed": lambda block: partial(checkpoint, block.forward, use_reentrant=False),
}


def build_block(config: ModelConfig, operators, dtype: torch.dtype) -> Block:
    """A block of the same weights, rounded to bf16, whatever the form and the dtype."""
    weights = build_small(replace(config, num_layers=1), dtype=torch.bfloat16).blocks[0].state_dict()
    block = Block(config, config.mixer, operators=operators).to("cuda", dtype)
    block.load_state_dict(weights)
    return block


def run(block: Block, forward, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The output, then the gradients of the input and of every parameter, by name."""
    width = block.mixer_norm.weight.shape[0]
    x_BTD = torch.randn(ROWS, TOKENS, width, generator=torch.Generator().manual_seed(6)).bfloat16()
    x_BTD = x_BTD.to("cuda", dtype).requires_grad_()
    document_start_BT = build_rows(ROWS, TOKENS, starts=STARTS)[1].cuda()
    out_BTD, _ = forward(x_BTD, document_start_BT, None)
    names, parameters = zip(*block.named_parameters(), strict=True)
    upstream_BTD = torch.randn(out_BTD.shape, generator=torch.Generator().manual_seed(7)).to("cuda", dtype)
    grads = torch.autograd.grad(out_BTD, [x_BTD, *parameters], upstream_BTD)
    return {"out": out_BTD, **dict(zip(["x", *names], grads, strict=True))}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_block_has_the_plain_blocks_output_and_gradients(name, way):
    """The scan may err by 1e-5, and the layers about it reorder some ten sums as long."""
    torch._dynamo.reset()
    plain, fused = (
        build_block(CONFIGS[name], build(), torch.float32) for build in (build_plain_operators, build_triton_operators)
    )
    expected, actual = run(plain, plain.forward, torch.float32), run(fused, WAYS[way](fused), torch.float32)
    errors = {key: relative_error(actual[key], expected[key]) for key in expected}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_block_errs_at_most_twice_as_much_as_the_plain_one(name, way):
    """Both against the plain block in fp64 on the same, rounded, weights; floors of two roundings to bf16 (2^-8) for
    the output and four for gradients, where the plain one happens to err by less. The plain form keeps fp32 between its
    operators' steps where the kernels round T, V' and the states to bf16."""
    torch._dynamo.reset()
    exact = build_block(CONFIGS[name], build_plain_operators(), torch.float64)
    plain, fused = (
        build_block(CONFIGS[name], build(), torch.bfloat16) for build in (build_plain_operators, build_triton_operators)
    )
    truth = run(exact, exact.forward, torch.float64)
    expected, actual = run(plain, plain.forward, torch.bfloat16), run(fused, WAYS[way](fused), torch.bfloat16)
    for key, value in truth.items():
        error, allowed = (relative_error(result[key].double(), value) for result in (actual, expected))
        floor = 2**-7 if key == "out" else 2**-6
        assert error <= 2 * allowed + floor, (key, error, allowed)


def test_model_on_kernels_has_the_plain_models_losses_and_continues_rows_step_by_step():
    config = replace(WIDE, tie_embeddings=False)
    rows = [tensor.cuda() for tensor in build_rows(ROWS, TOKENS, starts=STARTS)]
    models = [
        build_model(config, seed=1, device="cuda", operators=select_operators("cuda", kernels))
        for kernels in ("plain", "triton")
    ]
    plain_BT, fused_BT = (model(*rows, reduction="none").detach() for model in models)
    assert relative_error(fused_BT, plain_BT) < 1e-4
    with torch.no_grad():
        whole_BTV, _ = models[1].logits(rows[0], document_start_BT=rows[1])
        _, state = models[1].logits(rows[0][:, :-3], document_start_BT=rows[1][:, :-3])
        for token in (-3, -2, -1):
            last_B1V, state = models[1].logits(rows[0][:, token, None], state=state)
            assert relative_error(last_B1V[:, 0], whole_BTV[:, token]) < 1e-4
