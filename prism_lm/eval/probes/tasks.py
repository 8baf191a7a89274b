"""The nine tasks by name."""

from collections.abc import Callable

import numpy as np

from prism_lm.eval.probes.logic import (
    MODULUS,
    generate_local_xor,
    generate_modulo_addition,
    generate_mux,
    generate_parity,
    generate_silence_gate,
)
from prism_lm.eval.probes.recall import (
    generate_mqar,
    generate_palindrome,
    generate_poly_recall,
    generate_variable_tracking,
)
from prism_lm.eval.probes.rows import SYMBOLS, Rows, Task


def _describe(
    name: str, num_answers: int, generate: Callable[[np.random.Generator, int], Rows], asks: str
) -> tuple[str, Task]:
    return name, Task(name=name, asks=asks, num_answers=num_answers, generate=generate)


TASKS: dict[str, Task] = dict(
    [
        _describe("mqar", SYMBOLS, generate_mqar, "the value of each of 8 keys"),
        _describe("poly_recall", SYMBOLS, generate_poly_recall, "the first or the second value of 6 keys with two"),
        _describe("variable_tracking", SYMBOLS, generate_variable_tracking, "8 variables after 24 sets and copies"),
        _describe("parity", 2, generate_parity, "the parity of all bits so far"),
        _describe("local_xor", 2, generate_local_xor, "the exclusive or of the last two tokens"),
        _describe("modulo_addition", MODULUS, generate_modulo_addition, "the sum modulo 7 since the last BEGIN"),
        _describe("palindrome", SYMBOLS, generate_palindrome, "a word of 8 tokens, backwards"),
        _describe("silence_gate", SYMBOLS, generate_silence_gate, "the newest token heard while the gate was open"),
        _describe("mux", SYMBOLS, generate_mux, "the line of four that a selector names"),
    ]
)


def choose_tasks(names: list[str]) -> list[Task]:
    """The tasks of those names, all for none. Raises ValueError for a name that is not among TASKS."""
    for name in names:
        if name not in TASKS:
            raise ValueError(f"--tasks={name} must be a task; use {', '.join(TASKS)}")
    return [TASKS[name] for name in names or TASKS]
