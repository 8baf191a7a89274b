"""Small models and rows that the model's tests share."""

from dataclasses import replace

import torch
from torch import Tensor

from prism_lm.model.config import ModelConfig
from prism_lm.model.lm import LanguageModel, build_model

SMALL = ModelConfig(
    vocab_size=61,
    model_width=32,
    num_layers=2,
    num_heads=2,
    key_width=16,
    value_width=16,
    mlp_width=48,
    solver_rank=8,
    chunk_tokens=16,
)

FAMILIES = {
    "prism": SMALL,
    "gated_delta": replace(SMALL, mixer="gated_delta"),
    "linear_attention": replace(SMALL, mixer="linear_attention"),
    "ttt": replace(SMALL, mixer="ttt"),
    "attention": replace(SMALL, mixer="attention"),
    "hybrid": replace(SMALL, layer_pattern=["prism", "attention"], tie_embeddings=False),
}

# One change of SMALL a line: every ablation, and widths that do not fill the model's.
SWITCHES = {
    "no_solver": replace(SMALL, solver_steps=0),
    "one_step": replace(SMALL, solver_steps=1),
    "three_steps_full_rank": replace(SMALL, solver_steps=3, solver_rank=0),
    "four_steps": replace(SMALL, solver_steps=4),
    "one_step_constant_gain": replace(SMALL, solver_steps=1, gain="constant"),
    "identity": replace(SMALL, solver_activation="identity"),
    "no_anchor": replace(SMALL, anchor="none"),
    "constant_gain": replace(SMALL, gain="constant"),
    "sigmoid_decay": replace(SMALL, decay="sigmoid"),
    "wide_values": replace(SMALL, value_width=32, conv_width=3),
    "wide_values_no_solver": replace(SMALL, value_width=32, solver_steps=0),
}


def build_small(config: ModelConfig, *, seed: int = 3, dtype: torch.dtype = torch.float64) -> LanguageModel:
    """A model on the CPU whose recurrences remember, so that a lost state shows."""
    model = build_model(config, seed=seed, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            torch.nn.init.constant_(parameter, -5.0)
    return model


def build_rows(batch: int, tokens: int, *, starts: tuple[tuple[int, int], ...] = (), vocab_size: int = 61):
    """Random ids, labels and document starts; each row begins a document, others begin at the given (row, token)."""
    generator = torch.Generator().manual_seed(batch * 1000 + tokens)
    ids_BT = torch.randint(0, vocab_size, (batch, tokens + 1), generator=generator)
    document_start_BT = torch.zeros(batch, tokens, dtype=torch.bool)
    document_start_BT[:, 0] = True
    for row, token in starts:
        document_start_BT[row, token] = True
    return ids_BT[:, :-1].contiguous(), document_start_BT, ids_BT[:, 1:].contiguous()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square error over the root mean square of what was expected."""
    return ((actual - expected).norm() / expected.norm()).item()
