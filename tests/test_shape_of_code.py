"""The shape that the project keeps: short functions, short files, contracts in docstrings, few comments."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("launcher", "prism_lm", "kernels", "data_pipeline")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FORBIDDEN_NAMES = {"utils.py", "helpers.py", "common.py", "misc.py"}


def read_functions(path: Path) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Functions of a file with their lines of code, docstring and signature not counted."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield node, (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)


def test_no_kernel_is_longer_than_150_lines() -> None:
    kernels = {f"{path}:{node.name}": n for path in SOURCES for node, n in read_functions(path) if is_kernel(node)}
    assert not {name: lines for name, lines in kernels.items() if lines > 150}


def test_no_function_is_longer_than_sixty_lines_and_nine_in_ten_are_below_forty() -> None:
    lengths = {
        f"{path}:{node.name}": lines for path in SOURCES for node, lines in read_functions(path) if not is_kernel(node)
    }
    assert not {name: lines for name, lines in lengths.items() if lines > 60}
    assert sum(lines < 40 for lines in lengths.values()) >= 0.9 * len(lengths)


@pytest.mark.parametrize("paths", [SOURCES, TESTS], ids=["sources", "tests"])
def test_no_file_is_longer_than_450_lines(paths: list[Path]) -> None:
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert not {name: lines for name, lines in lengths.items() if lines > 450}


def test_every_file_and_every_public_function_of_a_room_has_a_docstring() -> None:
    missing = []
    for path in SOURCES:
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
            missing.append(str(path))
        missing += [f"{path}:{name}" for name in find_undocumented(path)]
    assert not missing


def find_undocumented(path: Path) -> Iterator[str]:
    """Public functions and classes at the top of a file without a docstring; verbs share one contract and one."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        named = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if named and node.name not in {"main", "build_parser"} and not ast.get_docstring(node):
            yield node.name


def test_comments_are_few() -> None:
    comments = lines = 0
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments += sum(token.type == tokenize.COMMENT for token in tokens)
        lines += len(text.splitlines())
    assert comments <= 0.07 * lines


def test_package_pages_of_contents_are_short() -> None:
    for path in SOURCES:
        if path.name == "__init__.py":
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 30, path


def test_no_file_is_named_for_having_no_subject() -> None:
    assert not [path for path in SOURCES + TESTS if path.name in FORBIDDEN_NAMES]


def test_no_function_swallows_unknown_keywords() -> None:
    swallowing = [f"{path}:{node.name}" for path in SOURCES for node, _ in read_functions(path) if node.args.kwarg]
    assert not swallowing


def test_tests_claim_something() -> None:
    vague = {"basic", "works", "happy", "simple", "ok"}
    names = [node.name for path in TESTS for node, _ in read_functions(path) if node.name.startswith("test_")]
    assert not [name for name in names if vague & set(name.split("_")) or len(name.split("_")) < 4]
