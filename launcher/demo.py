"""`prism demo`: the whole system on this machine in minutes, on real English text.

Fetches text, trains a tokenizer, writes shards, trains a tiny PRISM (two solver steps) and a Gated DeltaNet of equal
size, kills the first one on purpose and resumes it, scores both on held-out text beside n-gram models, and writes
samples and loss curves. What a run before this one finished is not done again.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.curves import draw_curves, read_metrics
from launcher.demo_text import fetch_demo_text

if TYPE_CHECKING:
    from data_pipeline.manifest import Manifest

CONFIGS = Path(__file__).parent.parent / "configs"
MODELS = {"PRISM, L=2": "tiny", "Gated DeltaNet": "tiny-gated_delta"}
KILLED_MODEL = "tiny"
PROMPTS = ("It was", "The", "She had")
POLL_S = 0.2


def main(arguments: list[str]) -> int:
    """Run every part that is not done yet, then print one table and where everything lies."""
    parsed = build_parser().parse_args(arguments)
    folder: Path = parsed.folder
    _check_matplotlib()
    started = time.monotonic()
    with announce("text"):
        sources = _find_text(folder, parsed.text)
    with announce("tokenizer and shards"):
        manifest = prepare(folder / "data", sources)
    for name, size in MODELS.items():
        with announce(f"training {name}"):
            train(folder, size)
    with announce("evaluation on the test split"):
        rows = evaluate(folder, manifest)
    with announce("samples and curves"):
        samples = write_samples(folder)
        draw_curves(
            {name: folder / size for name, size in MODELS.items()},
            {name: row["loss_nats"] for name, row in rows.items() if name not in MODELS},
            folder / "loss.png",
        )
    print(samples, format_table(rows), describe_files(folder), sep="\n")
    print(f"\n{time.monotonic() - started:.0f} s in all")
    check_floors_beaten(rows)
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/demo"), help="where it all goes (default %(default)s)"
    )
    parser.add_argument("--text", type=Path, help="folder of .txt files to use instead of fetching any")
    return parser


@contextmanager
def announce(part: str) -> Generator[None]:
    """Say what is being done, and how long it took."""
    print(f"== {part}", flush=True)
    started = time.monotonic()
    yield
    print(f"   {time.monotonic() - started:.1f} s", flush=True)


def _check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("prism demo must find matplotlib to draw its curves; pip install -e '.[demo]'")


def _find_text(folder: Path, given: Path | None) -> dict[str, Path]:
    if given is None:
        return fetch_demo_text(folder / "text")
    if not any(given.rglob("*.txt")):
        raise ValueError(f"--text={given} must be a folder with .txt files; leave it out to fetch some")
    return {"text": given}


def prepare(output: Path, sources: dict[str, Path]) -> "Manifest":
    """Tokenizer, shards and manifest by configs/data/demo.yaml."""
    from data_pipeline.config import PrepareConfig
    from data_pipeline.prepare import run_prepare
    from launcher.config import load_config

    inputs = [f"inputs.{name}={path}" for name, path in sources.items()]
    config = load_config(PrepareConfig, CONFIGS / "data" / "demo.yaml", [f"output={output}", *inputs])
    return run_prepare(config, report=lambda line: print(f"   {line}", flush=True))


def train(folder: Path, size: str) -> None:
    """Train one model as a user would, in a process of its own; the first one is killed once and resumed."""
    run_dir = folder / size
    if _read_status(run_dir) == "finished":
        print("   finished before")
        return
    if size == KILLED_MODEL and not (run_dir / "checkpoints").is_dir():
        _train_until_killed(folder, size)
    _wait(_start_training(folder, size))


def _start_training(folder: Path, size: str) -> "subprocess.Popen[bytes]":
    config = CONFIGS / "train" / f"{size}.yaml"
    keys = [f"run_dir={folder / size}", f"data.path={folder / 'data'}"]
    command = [sys.executable, "-m", "launcher", "train", str(config), *keys]
    return subprocess.Popen(command, start_new_session=True)


def _train_until_killed(folder: Path, size: str) -> None:
    """SIGKILL, which nothing can catch, once a checkpoint is there and training has gone on past it."""
    process = _start_training(folder, size)
    checkpoints = folder / size / "checkpoints"
    try:
        _wait_until(lambda: any(checkpoints.glob("step_*/manifest.json")), process)
        seen = len(read_metrics(folder / size))
        _wait_until(lambda: len(read_metrics(folder / size)) > seen + 1, process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    print(f"   killed on purpose at step {read_metrics(folder / size)[-1]['step']}; now resuming it", flush=True)


def _wait_until(holds: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    while not holds():
        if process.poll() is not None:
            raise DemoFailed(f"training ended with exit code {process.returncode}; its own message is above")
        time.sleep(POLL_S)


def _wait(process: "subprocess.Popen[bytes]") -> None:
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if code != 0:
        raise DemoFailed(f"training ended with exit code {code}; its own message is above")


class DemoFailed(RuntimeError):
    """A part of the demo did not come to its end, or to the result it is there to show."""


def _read_status(run_dir: Path) -> str | None:
    file = run_dir / "result.json"
    return json.loads(file.read_text(encoding="utf-8"))["status"] if file.is_file() else None


def evaluate(folder: Path, manifest: "Manifest") -> dict[str, dict[str, Any]]:
    """Figures of the n-gram floors and of each model on the same rows, by name."""
    from launcher.demo_floors import score_floors
    from launcher.evaluate import evaluate_run
    from launcher.trained_run import load_trained_run

    rows = score_floors(load_trained_run(folder / KILLED_MODEL), folder)
    for name, size in MODELS.items():
        run = load_trained_run(folder / size)
        parameters = sum(parameter.numel() for parameter in run.model.parameters())
        rows[name] = {"parameters": parameters, "tokens": run.tokens, **evaluate_run(folder / size, split="test")}
    return rows


def write_samples(folder: Path) -> str:
    """Three samples of the PRISM model, kept in samples.txt."""
    from launcher.generate import continue_prompts
    from launcher.trained_run import load_trained_run

    run = load_trained_run(folder / KILLED_MODEL)
    texts = continue_prompts(run, list(PROMPTS), max_new_tokens=80, temperature=0.8, top_k=0, top_p=0.95, seed=1)
    samples = "\n".join(f"--- sample {index + 1}\n{text.strip()}" for index, text in enumerate(texts))
    (folder / "samples.txt").write_text(samples + "\n", encoding="utf-8")
    return samples


def format_table(rows: dict[str, dict[str, Any]]) -> str:
    """One line a model, best last."""
    header = f"\n{'model':<16}{'parameters':>12}{'trained on':>16}{'nats/token':>12}{'bits/byte':>11}"
    lines = [header, "-" * len(header.strip())]
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["bits_per_byte"]):
        tokens = f"{row['tokens'] / 1e6:.2f} M tokens"
        lines.append(
            f"{name:<16}{row['parameters']:>12,}{tokens:>16}{row['loss_nats']:>12.3f}{row['bits_per_byte']:>11.3f}"
        )
    return "\n".join(lines)


def check_floors_beaten(rows: dict[str, dict[str, Any]]) -> None:
    """Raises DemoFailed if a trained model is no better than counting pairs of tokens."""
    floor = min(row["bits_per_byte"] for name, row in rows.items() if name not in MODELS)
    worse = [name for name in MODELS if rows[name]["bits_per_byte"] >= floor]
    if worse:
        raise DemoFailed(f"{' and '.join(worse)} must be below {floor:.3f} bits/byte, the best of the n-gram models")


def describe_files(folder: Path) -> str:
    """Where everything lies."""
    return "\n".join(
        [
            "",
            f"text, shards    {folder}/text, {folder}/data   (prism inspect {folder}/data)",
            f"runs            {folder}/{', '.join(MODELS.values())}   (tensorboard --logdir {folder})",
            f"loss curves     {folder}/loss.png",
            f"samples         {folder}/samples.txt   (prism generate {folder}/{KILLED_MODEL} --prompt 'It was')",
        ]
    )
