"""The model's own source files, made to stand alone: one flat folder of files that import one another relatively.

transformers reads a model's code from such a folder: it follows only imports of the form `from .sibling import name`,
and copies only files that the first one names. What an exported model imports besides the standard library, torch and
transformers stands in a `try`.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ENTRY = "prism_lm.export.hf_model"
ENTRY_NAME = "modeling_prism"
OURS = ("prism_lm", "kernels")
ALLOWED = {*sys.stdlib_module_names, "torch", "transformers"}
REFUSED = ("torch.distributed",)
TRAILER = """

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # transformers copies the files that this one names, and not those that they name in turn.
"""


def collect_sources() -> dict[str, str]:
    """File name to text, of everything that PrismForCausalLM needs.

    Functions that need another package, such as Triton, stay behind. Raises RuntimeError where a file cannot stand
    alone.
    """
    modules = find_modules(ENTRY)
    dropped = {module: find_unusable(tree) for module, tree in modules.items()}
    _check_nothing_is_missed(modules, dropped)
    texts = {flat_name(module): _rewrite(module, tree, dropped[module]) for module, tree in modules.items()}
    texts[ENTRY_NAME] += _name_siblings(texts)
    return {f"{name}.py": text for name, text in sorted(texts.items())}


def flat_name(module: str) -> str:
    """prism_lm.model.lm is prism_lm_model_lm there."""
    return ENTRY_NAME if module == ENTRY else module.replace(".", "_")


def find_modules(entry: str) -> dict[str, ast.Module]:
    """Every module of ours that `entry` imports, and those import in turn, parsed; imports in a `try` are not
    followed."""
    found: dict[str, ast.Module] = {}
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = ast.parse(_read(module))
            waiting += [_name_of(node) for node in list_imports(found[module]) if is_ours(node)]
    return found


def list_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements anywhere below, those in a `try` left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not isinstance(child, ast.Try):
            yield from list_imports(child)


def is_ours(node: ast.Import | ast.ImportFrom) -> bool:
    """Whether it has the form `from prism_lm... import name`, of kernels likewise."""
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS


def _name_of(node: ast.Import | ast.ImportFrom) -> str:
    """The module that is imported from."""
    return node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name


def find_unusable(tree: ast.Module) -> set[str]:
    """Functions of a module that need a package which an exported model does not ask for, or one another."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    unusable = {function.name for function in functions if any(map(_is_refused, list_imports(function)))}
    while more := {function.name for function in functions if _list_names(function) & unusable} - unusable:
        unusable |= more
    return unusable


def _is_refused(node: ast.Import | ast.ImportFrom) -> bool:
    if is_ours(node):
        return False
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return any(name.split(".")[0] not in ALLOWED or name.startswith(REFUSED) for name in names)


def _list_names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _check_nothing_is_missed(modules: dict[str, ast.Module], dropped: dict[str, set[str]]) -> None:
    for module, tree in modules.items():
        kept = [node for node in tree.body if getattr(node, "name", None) not in dropped[module]]
        if missed := dropped[module] & {name for node in kept for name in _list_names(node)}:
            raise RuntimeError(f"{module} must not use {sorted(missed)}, which an exported model has not")
        for node in (node for part in kept for node in list_imports(ast.Module([part], []))):
            if _is_refused(node):
                raise RuntimeError(f"{module}:{node.lineno} must import the standard library, torch or ours")
            if isinstance(node, ast.ImportFrom) and is_ours(node):
                _check_import(module, node, dropped)


def _check_import(module: str, node: ast.ImportFrom, dropped: dict[str, set[str]]) -> None:
    if missed := dropped[node.module or ""] & {alias.name for alias in node.names}:
        raise RuntimeError(f"{module}:{node.lineno} must not import {sorted(missed)}, which an exported model has not")


def _rewrite(module: str, tree: ast.Module, dropped: set[str]) -> str:
    """The text with imports of ours made relative and without the functions dropped."""
    lines = _read(module).splitlines(keepends=True)
    for node in list_imports(tree):
        if isinstance(node, ast.ImportFrom) and is_ours(node):
            old, new = f"from {node.module} import", f"from .{flat_name(node.module or '')} import"
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(old, new, 1)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in dropped:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines[first - 1 : node.end_lineno] = [""] * ((node.end_lineno or first) - first + 1)
    return "".join(lines)


def _name_siblings(texts: dict[str, str]) -> str:
    siblings = sorted(name for name in texts if name != ENTRY_NAME)
    return TRAILER + "".join(f"    from .{name} import __doc__ as _\n" for name in siblings)


def _read(module: str) -> str:
    path = ROOT / Path(*module.split("."))
    if path.is_dir():
        raise RuntimeError(f"{module} must be a file, not a package; import from the file itself")
    return path.with_suffix(".py").read_text(encoding="utf-8")
