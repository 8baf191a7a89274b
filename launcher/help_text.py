"""Help for someone with a terminal and nothing else: every key of a configuration, its type, default and meaning."""

import argparse
import ast
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from prism_lm.model.kernels import kernel_choices

WIDTH = 110

Precision = Literal["auto", "fp32", "bf16"]


def add_kernels_option(parser: argparse.ArgumentParser) -> None:
    """--kernels, for verbs that run a trained model."""
    words = "triton on CUDA and plain torch elsewhere, or one of them (default %(default)s)"
    parser.add_argument("--kernels", choices=kernel_choices(), default="auto", help=words)


def add_precision_option(parser: argparse.ArgumentParser) -> None:
    """--precision, for verbs that run a trained model."""
    words = (
        "of weights and activations: auto is bf16 on CUDA for a run trained in bf16, else fp32 (default %(default)s)"
    )
    parser.add_argument("--precision", choices=get_args(Precision), default="auto", help=words)


def add_sequence_degree_option(parser: argparse.ArgumentParser) -> None:
    """--sequence-degree, for verbs that torchrun may start as several processes."""
    words = "under torchrun: processes that share each row, dividing their number and the row (default: all of them)"
    parser.add_argument("--sequence-degree", type=int, metavar="N", help=words)


def describe_config(config_class: type[Any]) -> str:
    """Every key of a configuration dataclass, nested ones with dots, as lines of text for a terminal."""
    return "\n".join(_describe_fields(config_class, prefix=""))


def _describe_fields(config_class: type[Any], prefix: str) -> Iterator[str]:
    hints, meanings = get_type_hints(config_class), read_field_docs(config_class)
    for item in fields(config_class):
        key, hint = f"{prefix}{item.name}", hints[item.name]
        if isinstance(hint, type) and is_dataclass(hint):
            yield f"\n{key}: {meanings.get(item.name, '')}"
            yield from _describe_fields(hint, prefix=f"{key}.")
        else:
            yield f"  {key} ({spell_type(hint)}, {_spell_default(item)})"
            yield textwrap.fill(meanings.get(item.name, ""), WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def read_field_docs(config_class: type[Any]) -> dict[str, str]:
    """The string below each field of a dataclass, by field name, white space folded."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_class)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
            case _:
                continue
    return docs


def spell_type(hint: Any) -> str:
    """A type as a user would say it: `int`, `gelu|identity`, `list of int`, `float or none`."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "|".join(str(part) for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if part is type(None) else spell_type(part) for part in parts)
    if origin is dict:
        return f"map of {spell_type(parts[0])} to {spell_type(parts[1])}"
    if origin in (list, tuple):
        return f"list of {spell_type(parts[0])}"
    return "any value" if hint is Any else getattr(hint, "__name__", str(hint))


def _spell_default(item: Field[Any]) -> str:
    if item.default is not MISSING:
        return f"default {'none' if item.default is None else item.default}"
    if item.default_factory is not MISSING:
        return f"default {item.default_factory() or 'empty'}"
    return "required"
