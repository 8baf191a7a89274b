"""`prism generate RUN`: text from the newest checkpoint of a run.

The recurrent layers read the prompt once by the chunk form and then take one step a token, at constant memory.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.help_text import add_kernels_option

if TYPE_CHECKING:
    from launcher.trained_run import TrainedRun


def main(arguments: list[str]) -> int:
    """Print each sample, its prompt first; a line of three dashes stands between samples."""
    parsed = build_parser().parse_args(arguments)
    _check(parsed)
    from launcher.trained_run import load_trained_run

    prompt = sys.stdin.read() if parsed.prompt == "-" else parsed.prompt
    texts = continue_prompts(
        load_trained_run(Path(parsed.run), kernels=parsed.kernels),
        [prompt] * parsed.samples,
        max_new_tokens=parsed.max_new_tokens,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
        top_p=parsed.top_p,
        seed=parsed.seed,
    )
    print("\n---\n".join(texts))
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
    add_kernels_option(parser)
    return parser


def _check(parsed: argparse.Namespace) -> None:
    if parsed.samples < 1:
        raise ValueError(f"--samples={parsed.samples} must be at least 1; for example --samples 3")
    if parsed.max_new_tokens < 1:
        raise ValueError(
            f"--max-new-tokens={parsed.max_new_tokens} must be at least 1; for example --max-new-tokens 200"
        )


def continue_prompts(
    run: "TrainedRun",
    prompts: list[str],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
) -> list[str]:
    """Each prompt as the start of a document, with its continuation up to the document's end."""
    from prism_lm.model.generate import generate

    continuations = generate(
        run.model,
        [[run.tokenizer.bos_id, *run.tokenizer.encode(prompt)] for prompt in prompts],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_token=run.tokenizer.eos_id,
        num_known_tokens=run.tokenizer.vocab_size,
    )
    decoded = (run.tokenizer.decode(tokens) for tokens in continuations)
    return [prompt + text for prompt, text in zip(prompts, decoded, strict=True)]
