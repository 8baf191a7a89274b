"""The nine tasks solved token by token in plain Python: what each position must be answered with, None where nothing is
asked. Written from the tasks' descriptions, sharing nothing with their generators but the numbers of control tokens."""

from collections.abc import Callable

from prism_lm.eval.probes.rows import BEGIN, CLOSE, COPY, FIRST, LOAD, MIRROR, OPEN, QUERY, SECOND, SELECTORS, SET

Answers = list[int | None]


def solve_mqar(row: list[int]) -> Answers:
    values: dict[int, int] = {}
    answers: Answers = []
    for index, token in enumerate(row):
        is_written_key = token < 16 and token in values
        answers.append(values[token] if is_written_key else None)
        if token < 16 and not is_written_key:
            values[token] = row[index + 1]
    return answers


def solve_poly_recall(row: list[int]) -> Answers:
    values: dict[int, list[int]] = {}
    answers: Answers = [None] * len(row)
    for index in range(1, len(row)):
        before, token = row[index - 1], row[index]
        if before < 16 and 16 <= token < 32:
            values.setdefault(before, []).append(token)
        elif before < 16 and token in (FIRST, SECOND):
            answers[index] = values[before][0 if token == FIRST else 1]
    return answers


def solve_variable_tracking(row: list[int]) -> Answers:
    held: dict[int, int] = {}
    answers: Answers = [None] * len(row)
    for index, token in enumerate(row):
        if token == SET:
            held[row[index + 1]] = row[index + 2]
        elif token == COPY:
            held[row[index + 1]] = held[row[index + 2]]
        elif token == QUERY:
            answers[index + 1] = held[row[index + 1]]
    return answers


def solve_parity(row: list[int]) -> Answers:
    return [row[:index].count(1) % 2 if token == QUERY else None for index, token in enumerate(row)]


def solve_local_xor(row: list[int]) -> Answers:
    return [int(row[i - 2] != row[i - 1]) if token == QUERY else None for i, token in enumerate(row)]


def solve_modulo_addition(row: list[int]) -> Answers:
    total, answers = 0, Answers()
    for token in row:
        total = 0 if token == BEGIN else total + token if token < 7 else total
        answers.append(total % 7 if token == QUERY else None)
    return answers


def solve_palindrome(row: list[int]) -> Answers:
    answers: Answers = [None] * len(row)
    for index, token in enumerate(row):
        if token == MIRROR:
            begin = max(i for i in range(index) if row[i] == BEGIN)
            word = row[begin + 1 : index]
            for place, letter in enumerate(reversed(word)):
                answers[index + place] = letter
    return answers


def solve_silence_gate(row: list[int]) -> Answers:
    heard, is_open = None, False
    answers: Answers = []
    for token in row:
        is_open = token == OPEN or (is_open and token != CLOSE)
        heard = token if token < 32 and is_open else heard
        answers.append(heard if token == QUERY else None)
    return answers


def solve_mux(row: list[int]) -> Answers:
    lines: list[int] = []
    answers: Answers = []
    for token in row:
        answers.append(lines[token - SELECTORS.start] if token in SELECTORS else None)
        lines = [] if token == LOAD else [*lines, token] if token < 32 else lines
    return answers


SOLVERS: dict[str, Callable[[list[int]], Answers]] = {
    "mqar": solve_mqar,
    "poly_recall": solve_poly_recall,
    "variable_tracking": solve_variable_tracking,
    "parity": solve_parity,
    "local_xor": solve_local_xor,
    "modulo_addition": solve_modulo_addition,
    "palindrome": solve_palindrome,
    "silence_gate": solve_silence_gate,
    "mux": solve_mux,
}
