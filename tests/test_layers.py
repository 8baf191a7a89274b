"""The arrows between rooms that import-linter's contracts cannot draw: names inside an outside package."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [
    path for room in ("launcher", "prism_lm", "kernels", "data_pipeline") for path in (ROOT / room).rglob("*.py")
]
SILENT_ROOMS = (ROOT / "kernels", ROOT / "prism_lm" / "model")


def read_imports(path: Path) -> Iterator[str]:
    """Dotted names a file imports, and attributes it reaches through a module (`torch.distributed`)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=level):
                assert level == 0, f"{path}: imports are absolute"
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Attribute(value=ast.Name(id=base), attr=attribute):
                yield f"{base}.{attribute}"
            case _:
                continue


def test_reader_finds_every_way_of_reaching_torch_distributed(tmp_path: Path) -> None:
    ways = [
        "import torch.distributed as dist",
        "from torch import distributed",
        "import torch\ntorch.distributed.barrier()",
    ]
    for way in ways:
        (tmp_path / "sample.py").write_text(way)
        assert "torch.distributed" in set(read_imports(tmp_path / "sample.py")), way


def test_model_and_kernels_never_reach_torch_distributed() -> None:
    silent = [path for path in SOURCES if any(room in path.parents for room in SILENT_ROOMS)]
    assert len(silent) > 10
    for path in silent:
        assert not [name for name in read_imports(path) if name.startswith("torch.distributed")], path


@pytest.mark.parametrize(
    ("package", "only_file"), [("deepspeed", "prism_lm/train/engine.py"), ("omegaconf", "launcher/config.py")]
)
def test_outside_package_is_imported_by_one_file(package: str, only_file: str) -> None:
    importers = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if any(name.split(".")[0] == package for name in read_imports(path))
    }
    assert importers == {only_file}


HEAVY = {"deepspeed", "transformers", "lm_eval", "streaming", "tensorboard"}


@pytest.mark.parametrize(
    "command", [[], ["--help"], ["train", "--help"], ["prepare", "--help"], ["sizes"], ["train", "missing.yaml"]]
)
def test_help_and_config_parsing_load_no_heavy_package(command: list[str]) -> None:
    program = (
        "import sys\n"
        "from launcher.__main__ import main\n"
        f"try: main({command!r})\n"
        "except SystemExit: pass\n"
        f"print('LOADED', sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"
