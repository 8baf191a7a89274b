"""Which parameters decay."""

from torch import nn

from prism_lm.model.lm import LanguageModel
from prism_lm.train.optim import OptimConfig, build_adamw, split_by_decay
from tests.harness import TinyModel, build_language_config


def build_language_model(*, tie_embeddings: bool) -> LanguageModel:
    return LanguageModel(build_language_config(layer_pattern=["prism", "attention"], tie_embeddings=tie_embeddings))


def list_spared(model: LanguageModel | TinyModel) -> set[str]:
    spared = {id(parameter) for parameter in split_by_decay(model)[1]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in spared}


def test_norms_biases_decay_rates_and_embeddings_never_decay() -> None:
    assert list_spared(TinyModel(num_blocks=1)) == {
        "embedding.weight",
        "blocks.0.norm.weight",
        "blocks.0.up.bias",
        "blocks.0.A_log",
    }


def test_language_model_spares_vectors_and_the_table_but_not_a_head_of_its_own() -> None:
    model = build_language_model(tie_embeddings=False)
    spared = list_spared(model)
    assert "head.weight" not in spared and "embedding.weight" in spared
    assert {name for name, parameter in model.named_parameters() if parameter.ndim < 2} <= spared
    assert "embedding.weight" in list_spared(build_language_model(tie_embeddings=True))


def test_every_parameter_is_optimised_once() -> None:
    model = build_language_model(tie_embeddings=True)
    groups = build_adamw(model, OptimConfig(weight_decay=0.3)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    optimised = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(optimised) == sorted(id(parameter) for parameter in model.parameters())


def test_weights_that_end_off_16_bytes_come_last_so_that_the_others_stay_aligned() -> None:
    model = nn.ModuleDict({"odd": nn.LayerNorm(3), "norm": nn.LayerNorm(8), "matrix": nn.Linear(8, 8)})
    _, spared = split_by_decay(model)
    assert [parameter.numel() for parameter in spared] == [8, 8, 8, 3, 3]
