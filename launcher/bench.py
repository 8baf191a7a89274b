"""`prism bench CONFIG [key=value ...] [CONFIG [key=value ...]]`: time whole training steps on random tokens.

Forward, loss, backward, clip and fused AdamW in one process of plain torch, weights in the dtype of train.precision. A
key=value belongs to the CONFIG before it. The peer is timed in the same run, at its own size of the first CONFIG's
width. A model that is still at it --limit-s after its first step is timed by the steps it took, and not at longer
rows.
"""

import argparse
import gc
import json
import math
import platform
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.bench_report import write_report
from launcher.config import RunConfig, load_config

if TYPE_CHECKING:
    import torch

    from prism_lm.train.bench import Batch, Candidate, Timing

PEERS = ("fla_gated_delta",)
EXAMPLE = """\
example, against a peer of 380 M parameters:
  prism bench configs/train/350m.yaml model.tie_embeddings=false --batch 16x2048 2x16384 --peer fla_gated_delta
and of 1.467 B:
  prism bench configs/train/1b.yaml model.mlp_width=5120 parallel.compile=true --peer fla_gated_delta --profile
and of other mixers by the length of a row:
  prism bench configs/train/130m.yaml configs/train/130m-transformer.yaml --batch 64x512 16x2048 4x8192 --out runs/bench
"""
HEADER = (
    f"{'model':<64}{'parameters':>15}{'batch':>10}{'tokens/s':>11}{'20%':>10}{'80%':>10}{'step ms':>10}{'MFU %':>8}"
    f"{'peak GiB':>10}{'first s':>9}{'loss':>8}"
)


@dataclass(frozen=True, kw_only=True)
class Requested:
    """One CONFIG with what was typed after it."""

    name: str
    config: RunConfig


def main(arguments: list[str]) -> int:
    """Print the machine, a table and one line of JSON."""
    parsed = build_parser().parse_intermixed_args(arguments)
    requested = read_requested(parsed.words)
    batches = [read_batch(text) for text in parsed.batch]
    if parsed.steps < 1 or parsed.warmup_steps < 1:
        raise ValueError(
            f"--steps={parsed.steps}, --warmup-steps={parsed.warmup_steps} must be at least 1; use 10 and 3"
        )
    if parsed.limit_s <= 0:
        raise ValueError(f"--limit-s={parsed.limit_s:g} must be above 0; leave it out for no limit")
    out: Path | None = parsed.out
    if out is not None:
        _make_folder(out)
    measured = run_bench(requested, batches, parsed)
    print(json.dumps(measured))
    if out is not None:
        write_report(out, measured, "prism bench " + shlex.join(arguments))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLE
    )
    parser.add_argument("words", metavar="CONFIG|key=value", nargs="+", help="YAML files, each with its keys after it")
    parser.add_argument(
        "--batch", nargs="+", default=["16x2048"], metavar="ROWSxTOKENS", help="batches to time (default: 16x2048)"
    )
    parser.add_argument("--peer", choices=PEERS, help="also time this peer; absent packages are named")
    parser.add_argument("--profile", action="store_true", help="also show where a step's GPU time goes")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default %(default)s)")
    parser.add_argument("--warmup-steps", type=int, default=3, help="steps before them (default %(default)s)")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="after a model's first step at a batch (default: none)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write bench.json, bench.md, and a plot there")
    return parser


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out={out} must be a folder that can be made: {error.strerror}; name another") from None


def read_requested(words: list[str]) -> list[Requested]:
    """Each CONFIG with the overrides typed after it. Raises ValueError for a key before any CONFIG."""
    groups: list[list[str]] = []
    for word in words:
        if "=" not in word:
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        else:
            raise ValueError(
                f"{word} must come after the CONFIG it changes; for example configs/train/350m.yaml {word}"
            )
    return [
        Requested(name=" ".join([path.rpartition("/")[2].removesuffix(".yaml"), *keys]), config=_load(path, keys))
        for path, *keys in groups
    ]


def _load(path: str, keys: list[str]) -> RunConfig:
    return load_config(RunConfig, path, keys)


def read_batch(text: str) -> "Batch":
    """`16x2048` as rows and tokens. Raises ValueError for another form."""
    from prism_lm.train.bench import Batch

    rows, _, tokens = text.partition("x")
    if not (rows.isdecimal() and tokens.isdecimal() and int(rows) and int(tokens)):
        raise ValueError(f"--batch={text} must be ROWSxTOKENS, both at least 1; for example 16x2048")
    return Batch(rows=int(rows), row_tokens=int(tokens))


def run_bench(requested: list[Requested], batches: "list[Batch]", parsed: argparse.Namespace) -> dict[str, Any]:
    """Time every candidate at every batch, printing as it goes; returns the machine and every timing, plainly."""
    from prism_lm.parallel.mesh import Ranks, choose_device

    device = choose_device(Ranks())
    candidates = [_describe(item, device.type) for item in requested]
    absent = _add_peer(candidates, requested[0].config, parsed.peer)
    machine = describe_machine(device)
    print(" · ".join(f"{name} {value}" for name, value in machine.items()))
    print("\n".join([*absent, "", HEADER]))
    timings: list[dict[str, Any]] = []
    for batch in batches:
        for candidate, dtype in candidates:
            slow = find_slower(timings, candidate.name, batch)
            row = _skip(candidate, batch, slow) if slow else _time(candidate, batch, device, dtype, parsed)
            timings.append(row)
    return {"machine": machine, "absent": absent, "steps": parsed.steps, "timings": timings}


def find_slower(timings: list[dict[str, Any]], name: str, batch: "Batch") -> str | None:
    """Why a model is not timed at this batch: it met the limit at rows no longer; None where it is timed."""
    for timing in timings:
        shorter = timing["row_tokens"] <= batch.row_tokens
        if timing["name"] == name and timing.get("met_limit") and shorter:
            seconds = timing["step_ms"]["p50"] / 1e3
            return f"not timed: a step of {timing['rows']}x{timing['row_tokens']} took {seconds:.1f} s"
    return None


def _skip(candidate: "Candidate", batch: "Batch", why: str) -> dict[str, Any]:
    """A row that says why there are no figures."""
    print(f"{candidate.name[:63]:<64}{'':>15}{batch!s:>10}  {why}", flush=True)
    return {"name": candidate.name, "rows": batch.rows, "row_tokens": batch.row_tokens, "why_absent": why}


def _describe(item: Requested, device_type: str) -> "tuple[Candidate, torch.dtype]":
    from prism_lm.model.kernels import choose_kernels, select_operators
    from prism_lm.train.bench import describe_model

    parallel = item.config.parallel
    kernels = choose_kernels(parallel.kernels, device_type)
    operators = select_operators(device_type, kernels)
    name = f"{item.name} [{kernels}]"
    return describe_model(name, item.config.model, operators, parallel), _dtype_of(item.config)


def _dtype_of(config: RunConfig) -> "torch.dtype":
    import torch

    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32


def _add_peer(candidates: "list[tuple[Candidate, torch.dtype]]", config: RunConfig, peer: str | None) -> list[str]:
    """Append the peer that was asked for; where its package is absent, return a line that says so."""
    if peer is None:
        return []
    from prism_lm.train.bench_peer import describe_peer, is_installed

    candidate = describe_peer(model_width=config.model.model_width, vocab_size=config.model.vocab_size)
    if not is_installed():
        return [f"{peer}: absent, not timed; pip install -e '.[peers]' -c constraints.txt brings it"]
    candidates.append((candidate, _dtype_of(config)))
    return []


def describe_machine(device: "torch.device") -> dict[str, str]:
    """What the figures were measured on."""
    import torch

    from launcher.provenance import find_version, read_commit

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    packages = {package: find_version(package) or "absent" for package in ("triton", "flash-linear-attention")}
    return {"device": name, "torch": torch.__version__, **packages, "commit": read_commit() or "unknown"}


def _time(
    candidate: "Candidate", batch: "Batch", device: "torch.device", dtype: "torch.dtype", parsed: argparse.Namespace
) -> dict[str, Any]:
    """Time one candidate and print its row; what does not fit in memory is a row that says so."""
    import torch

    try:
        timing = _measure(candidate, batch, device, dtype, parsed)
    except torch.OutOfMemoryError:
        return _skip(candidate, batch, "out of memory")
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("\n".join([format_row(timing), *format_breakdown(timing)]), flush=True)
    return timing.describe()


def _measure(
    candidate: "Candidate", batch: "Batch", device: "torch.device", dtype: "torch.dtype", parsed: argparse.Namespace
) -> "Timing":
    from prism_lm.train.bench import time_candidate
    from prism_lm.train.step_profile import profile_step

    timing, stepper = time_candidate(
        candidate,
        batch,
        device=device,
        dtype=dtype,
        warmup_steps=parsed.warmup_steps,
        steps=parsed.steps,
        limit_s=parsed.limit_s,
    )
    if parsed.profile:
        timing.breakdown, timing.kernels = profile_step(stepper)
    return timing


def format_row(timing: "Timing") -> str:
    """One line of the table."""
    mfu = "-" if timing.mfu_pct is None else f"{timing.mfu_pct:.1f}"
    return (
        f"{timing.name[:63]:<64}{timing.parameters:>15,}{timing.batch!s:>10}{timing.tokens_per_s():>11,.0f}"
        f"{timing.tokens_per_s(0.2):>10,.0f}{timing.tokens_per_s(0.8):>10,.0f}{timing.quantile_ms(0.5):>10.1f}{mfu:>8}"
        f"{timing.peak_gib:>10.1f}{timing.first_step_s:>9.1f}{timing.loss_nats:>8.3f}"
    )


def format_breakdown(timing: "Timing") -> list[str]:
    """A profile below its row: kinds of work, then the largest kernels; nothing where none was taken."""
    if not timing.breakdown:
        return []
    step_ms = timing.quantile_ms(0.5)
    waited = {"waiting for work": max(0.0, step_ms - sum(timing.breakdown.values()))}
    kinds = [
        f"    {kind:<18}{ms:>8.2f} ms{100 * ms / step_ms:>6.1f} %" for kind, ms in (timing.breakdown | waited).items()
    ]
    return [*kinds, *(f"      {ms:>8.2f} ms  {name}" for name, ms in timing.kernels)]
