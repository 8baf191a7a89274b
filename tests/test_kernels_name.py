"""transformers probes a top-level package named `kernels` when a model class loads; ours must leave it in peace."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_fresh(program: str) -> str:
    environment = {"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_package_is_a_docstring_and_nothing_else() -> None:
    program = "import kernels; print(sorted(name for name in vars(kernels) if not name.startswith('__')))"
    assert run_fresh(program).strip() == "[]"
    assert not hasattr(__import__("kernels"), "__version__")


def test_transformers_builds_a_model_class_beside_our_kernels() -> None:
    program = (
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "import kernels\n"
        "config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,"
        " num_attention_heads=1)\n"
        "print(type(LlamaForCausalLM(config)).__name__, kernels.__file__)\n"
    )
    assert run_fresh(program).split() == ["LlamaForCausalLM", str(ROOT / "kernels" / "__init__.py")]


def test_lm_eval_imports_beside_our_kernels() -> None:
    program = "import kernels; from lm_eval.api.model import TemplateLM; print(TemplateLM.__name__)"
    assert run_fresh(program).split() == ["TemplateLM"]


def test_no_distribution_named_kernels_is_installed_and_our_version_skips_the_range_it_probes() -> None:
    names = {(distribution.metadata["Name"] or "").lower() for distribution in importlib.metadata.distributions()}
    assert "kernels" not in names
    version = tuple(int(part) for part in importlib.metadata.version("prism-lm").split(".")[:2])
    assert version != (0, 18)
