"""What the README says to type runs, in the order it says it, on the tiny config; the paths it names exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.synthetic import write_synthetic_dataset
from prism_lm.model.cost import count_parameters, flops_per_token, state_bytes
from prism_lm.model.sizes import named_size
from tests.harness import ForkedCommand

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORTER = {
    "train": ["train.steps=2", "train.schedule.warmup_steps=1", "train.eval_rows=8", "train.log_every_steps=1"],
    "prepare": ["vocab_size=500", "row_tokens=64", "tokenizer_sample_mib=1"],
    "generate": ["--max-new-tokens=4"],
}


def read_commands() -> list[list[str]]:
    """Lines of the bash blocks that call our command, directly or under torchrun; those of sh blocks need a cluster."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if re.match(r"(prism|torchrun) ", line)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place like a fresh clone after the demo: configs, the demo's data, some text of the user's."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "configs").symlink_to(ROOT / "configs")
    write_synthetic_dataset(folder / "runs/demo/data", vocab_size=320, row_tokens=256, documents=400, seed=0)
    (folder / "texts").mkdir()
    for number, file in enumerate(sorted((ROOT / "kernels").rglob("*.py"))):
        (folder / "texts" / f"{number}.txt").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "prompts.txt").write_text("It was\nAnd then\n", encoding="utf-8")
    return folder


def run_command(words: list[str], folder: Path) -> None:
    """To its end, or fail with what it wrote. What torchrun starts are new processes; what `prism` starts is
    forked with everything imported."""
    program, verb = words[0], words[words.index("launcher") + 1] if "launcher" in words else words[1]
    arguments = [*words[1:], *SHORTER.get(verb, [])]
    written = folder / "stderr.txt"
    written.unlink(missing_ok=True)
    if program == "prism":
        code = ForkedCommand(arguments, {}, written, folder=folder).wait(280)
    else:
        paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        with written.open("w", encoding="utf-8") as stderr:
            command = [program, *arguments]
            code = subprocess.run(
                command, cwd=folder, env={**os.environ, **paths}, stderr=stderr, timeout=280
            ).returncode
    assert code == 0, f"{shlex.join(words)}\n{written.read_text(encoding='utf-8')[-4000:]}"


@pytest.mark.timeout(900)
def test_every_command_of_the_readme_runs_to_its_end_in_order(folder: Path) -> None:
    commands = read_commands()
    assert len(commands) >= 9
    for words in commands:
        run_command(words, folder)


def test_the_python_of_the_readme_runs_after_its_commands(folder: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 1 and (folder / "exported/tiny").is_dir()
    done = subprocess.run([sys.executable, "-c", blocks[0]], cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "It was" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]


def test_every_size_of_the_readme_is_what_the_cost_model_says() -> None:
    rows = re.findall(
        r"^\| (\w+) \| (\d+) x (\d+) \| ([\d,]+) \| ([\de.+]+) \| ([\d.]+) MiB", README, flags=re.MULTILINE
    )
    assert len(rows) == 6
    for name, layers, width, parameters, flops, state_mib in rows:
        config = named_size(name)
        assert (int(layers), int(width)) == (config.num_layers, config.model_width)
        assert int(parameters.replace(",", "")) == count_parameters(config)
        assert float(flops) == pytest.approx(flops_per_token(config, 2048), rel=5e-3)
        assert float(state_mib) == pytest.approx(state_bytes(config) / 2**20, abs=5e-3)


def test_every_path_the_readme_names_exists() -> None:
    code = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    named = re.findall(r"`((?:kernels|prism_lm|data_pipeline|launcher|slurm|configs|tests)/[\w./-]*|\w+\.md)`", code)
    tree = re.findall(r"^(\w+/) ", README, flags=re.MULTILINE)
    assert len(named) >= 5 and len(tree) == 7
    assert [path for path in named + tree if not (ROOT / path).exists()] == []


def test_every_make_target_the_readme_names_exists() -> None:
    targets = set(re.findall(r"make ([\w-]+)", README))
    assert targets >= {"demo", "test"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)] == []


def test_first_screen_holds_a_result_one_command_the_tree_and_what_is_missing() -> None:
    screen = README.splitlines()[:34]
    assert [line for line in screen if re.search(r"\d{4}-\d{2}-\d{2}", line)]
    text = "\n".join(screen)
    assert "make demo" in text and "kernels/" in text and "Not here yet" in text
