"""No forward returns an in-place result: torch 2.11's compiler drops its gradient, and newer ones do not tell."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).parent.parent.parent / "kernels"


def read_forwards(source: str) -> Iterator[ast.FunctionDef]:
    """The `forward` of every autograd.Function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(base) for base in node.bases):
            yield from (item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "forward")


def is_stale(expression: ast.expr) -> bool:
    """A call of a method that changes its tensor, or of `.to`, which may change nothing."""
    method = (
        expression.func.attr if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute) else ""
    )
    return method == "to" or (method.endswith("_") and not method.endswith("__"))


def find_stale_results(source: str) -> list[str]:
    stale = []
    for forward in read_forwards(source):
        returned = [node.value for node in ast.walk(forward) if isinstance(node, ast.Return) and node.value]
        results = [part for value in returned for part in (value.elts if isinstance(value, ast.Tuple) else [value])]
        names = {result.id for result in results if isinstance(result, ast.Name)}
        stale += [ast.unparse(result) for result in results if is_stale(result)]
        for node in ast.walk(forward):
            if isinstance(node, ast.Expr) and is_stale(node.value) and ast.unparse(node.value.func.value) in names:
                stale.append(ast.unparse(node))
    return stale


@pytest.mark.parametrize(
    "body", ["return (x * x).mul_(w)", "return x.to(w.dtype)", "y = x * x; y.mul_(w); return y, w"]
)
def test_reader_finds_each_kind_of_stale_result(body: str) -> None:
    assert find_stale_results(f"class F(torch.autograd.Function):\n    def forward(ctx, x, w): {body}")


def test_every_forward_returns_fresh_results() -> None:
    sources = [path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.py")]
    assert sum(len(list(read_forwards(source))) for source in sources) >= 5
    assert [stale for source in sources for stale in find_stale_results(source)] == []
