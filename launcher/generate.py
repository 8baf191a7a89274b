"""`prism generate RUN`: text from the newest checkpoint of a run.

The recurrent layers read the prompt once by the chunk form and then take one step a token, at constant memory.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.trained_run import TrainedRun


def main(arguments: list[str]) -> int:
    """Print each sample; the prompt is printed with it."""
    parsed = build_parser().parse_args(arguments)
    _check(parsed)
    from launcher.trained_run import load_trained_run

    run = load_trained_run(Path(parsed.run))
    for index, text in enumerate(_sample(run, parsed)):
        print(f"--- sample {index + 1}" if parsed.samples > 1 else "", text, sep="\n" if parsed.samples > 1 else "")
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run that has saved a checkpoint")
    parser.add_argument("--prompt", default="", help="text to continue; - reads it from standard input (default: none)")
    parser.add_argument(
        "--samples", type=int, default=1, help="how many continuations, as one batch (default %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=200, help="longest continuation (default %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token (default %(default)s)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample among the k likeliest; 0 for all (default %(default)s)"
    )
    parser.add_argument(
        "--top-p", type=float, default=0.95, help="sample within this probability (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default %(default)s)")
    return parser


def _check(parsed: argparse.Namespace) -> None:
    if parsed.samples < 1:
        raise ValueError(f"--samples={parsed.samples} must be at least 1; for example --samples 3")
    if parsed.max_new_tokens < 1:
        raise ValueError(
            f"--max-new-tokens={parsed.max_new_tokens} must be at least 1; for example --max-new-tokens 200"
        )


def _sample(run: "TrainedRun", parsed: argparse.Namespace) -> list[str]:
    from prism_lm.model.generate import generate

    prompt = sys.stdin.read() if parsed.prompt == "-" else parsed.prompt
    ids = [run.tokenizer.bos_id, *run.tokenizer.encode(prompt)]
    continuations = generate(
        run.model,
        [ids] * parsed.samples,
        max_new_tokens=parsed.max_new_tokens,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
        top_p=parsed.top_p,
        seed=parsed.seed,
        stop_token=run.tokenizer.eos_id,
    )
    return [prompt + run.tokenizer.decode(tokens) for tokens in continuations]
