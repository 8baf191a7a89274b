"""The exported source files are ours, stand alone, and ask for nothing but torch, transformers and Python itself."""

import ast
import difflib
import re
import sys

import pytest

from prism_lm.export import sources
from prism_lm.export.sources import ENTRY, ROOT, collect_sources, find_modules, find_unusable, flat_name

REFUSED = ("triton", "deepspeed", "distributed", "kernels", "prism_lm", "launcher", "data_pipeline")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return collect_sources()


def list_imports(text: str) -> list[ast.ImportFrom]:
    """One node a module that the text imports, wherever it stands outside a `try`."""
    found = []
    for node in sources.list_imports(ast.parse(text)):
        plain = [ast.ImportFrom(alias.name, [], 0) for alias in node.names] if isinstance(node, ast.Import) else [node]
        found += plain
    return found


def test_nothing_but_torch_transformers_and_the_standard_library_is_imported(texts) -> None:
    imported = {node.module.split(".")[0] for text in texts.values() for node in list_imports(text) if not node.level}
    assert {"torch", "transformers"} <= imported
    assert imported <= {*sys.stdlib_module_names, "torch", "transformers"}


def test_no_statement_names_triton_deepspeed_or_process_groups(texts) -> None:
    for name, text in texts.items():
        named = {part for node in list_imports(text) if not node.level for part in node.module.split(".")}
        assert not named & set(REFUSED), name


def test_the_one_import_of_our_package_stands_in_a_try(texts) -> None:
    absolute = [line for text in texts.values() for line in text.splitlines() if re.match(r"\s*from prism_lm", line)]
    assert absolute == ["    from prism_lm.model.kernels import build_triton_operators as _build_fast"]


def test_every_sibling_that_is_imported_is_there_and_named_by_the_first_file(texts) -> None:
    relative = {node.module for text in texts.values() for node in list_imports(text) if node.level == 1}
    assert {f"{name}.py" for name in relative} == texts.keys() - {"modeling_prism.py"}
    first = re.findall(r"^\s*from\s+\.(\S+)\s+import", texts["modeling_prism.py"], flags=re.MULTILINE)
    assert set(first) == relative


def test_files_are_the_trainers_own_but_for_imports_and_functions_left_behind(texts) -> None:
    for module, tree in find_modules(ENTRY).items():
        original = (ROOT / f"{module.replace('.', '/')}.py").read_text().splitlines()
        exported = texts[f"{flat_name(module)}.py"].split(sources.TRAILER)[0].splitlines()
        changes = [line for line in difflib.ndiff(original, exported) if line.startswith("+ ")]
        assert all(re.match(r"\+ \s*from \.", line) for line in changes), module
        assert find_unusable(tree) == ({"is_interpreted", "check_on_gpu"} if module == "kernels.checks" else set())


def test_model_code_that_uses_a_function_left_behind_is_refused(monkeypatch) -> None:
    bad = "from kernels.checks import check_on_gpu\n"
    monkeypatch.setattr(sources, "_read", lambda module, read=sources._read: bad if module == ENTRY else read(module))
    with pytest.raises(RuntimeError, match=r"must not import \['check_on_gpu'\]"):
        collect_sources()


@pytest.mark.parametrize("line", ["import triton", "from torch.distributed import all_reduce", "import numpy as np"])
def test_model_code_that_needs_another_package_is_refused(monkeypatch, line) -> None:
    monkeypatch.setattr(sources, "_read", lambda module: f"{line}\n")
    with pytest.raises(RuntimeError, match=r"must import the standard library, torch or ours"):
        collect_sources()
