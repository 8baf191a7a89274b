from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_type_hints

import pytest

from data_pipeline.config import PrepareConfig
from launcher.config import RunConfig
from launcher.help_text import describe_config, read_field_docs, spell_type


def walk_configs(config_class: type[Any]) -> list[type[Any]]:
    nested = [hint for hint in get_type_hints(config_class).values() if is_dataclass(hint)]
    return [config_class, *(inner for hint in nested for inner in walk_configs(hint))]


@pytest.mark.parametrize("config_class", [*walk_configs(RunConfig), PrepareConfig], ids=lambda item: item.__name__)
def test_every_key_has_a_meaning_written_below_it(config_class: type[Any]) -> None:
    docs = read_field_docs(config_class)
    assert [item.name for item in fields(config_class) if len(docs.get(item.name, "")) < 5] == []


def test_help_lists_every_key_with_type_and_default() -> None:
    text = describe_config(RunConfig)
    assert "  run_dir (str, required)" in text
    assert "  model.mixer (prism|gated_delta|linear_attention|ttt|attention|peer, default prism)" in text
    assert "  train.optim.learning_rate (float, default 0.0003)" in text
    assert "  parallel.compile (bool, default False)" in text


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "int"),
        (float | None, "float or none"),
        (Literal["a", "b"], "a|b"),
        (list[int], "list of int"),
        (dict[str, float], "map of str to float"),
    ],
)
def test_types_are_spelled_as_one_would_say_them(hint: Any, words: str) -> None:
    assert spell_type(hint) == words
