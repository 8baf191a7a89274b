"""Shared beginnings on Triton kernels on a CUDA device: states carried over, rows of any length, one token and more."""

from dataclasses import replace

import pytest
import torch

from prism_lm.eval.loglikelihood import Likelihood, score_rows
from prism_lm.model.config import ModelConfig
from prism_lm.model.kernels import build_triton_operators
from prism_lm.model.lm import LanguageModel, build_model
from tests.prism_lm.eval.test_loglikelihood import ROWS, measure_error, score_singly
from tests.prism_lm.model.builders import SMALL, build_small

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
WIDE = replace(SMALL, model_width=256, num_heads=4, key_width=64, value_width=64, mlp_width=336, solver_rank=32)
CONFIGS = {"prism": WIDE, "gated_delta": replace(WIDE, mixer="gated_delta")}
CONFIGS["hybrid"] = replace(WIDE, layer_pattern=["prism", "attention"], tie_embeddings=False)


def build_on_triton(config: ModelConfig, weights: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    model = build_model(config, seed=0, device=DEVICE, dtype=dtype, operators=build_triton_operators())
    model.load_state_dict(weights.state_dict())
    return model.eval()


def score_all_singly(model: LanguageModel) -> list[Likelihood]:
    return [score_singly(model, row) for row in ROWS]


@pytest.mark.parametrize("batch_tokens", [128, 100_000])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_beginnings_are_as_near_to_fp64_as_rows_read_one_by_one(
    name: str, dtype: torch.dtype, batch_tokens: int
) -> None:
    """Both read the same tokens by the same kernels, cut in other places: the order of sums differs."""
    weights = build_small(CONFIGS[name], dtype=torch.bfloat16)
    exact = score_all_singly(build_small(CONFIGS[name], dtype=torch.bfloat16).double())
    model = build_on_triton(CONFIGS[name], weights, dtype)
    allowed = measure_error(score_all_singly(model), exact)
    error = measure_error(score_rows(model, ROWS, batch_tokens=batch_tokens), exact)
    assert error <= 2 * allowed + torch.finfo(dtype).eps, (error, allowed)
