"""`prism generate RUN`: text from the newest checkpoint of a run.

The recurrent layers read the prompt once by the chunk form and then take one step a token, at constant memory. A prompt
too long for one GPU is cut over several: `torchrun --nproc-per-node N -m launcher generate RUN --prompt -`.
"""

import argparse
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.environment import apply_environment, detect_environment
from launcher.help_text import add_kernels_option

if TYPE_CHECKING:
    from launcher.trained_run import TrainedRun
    from prism_lm.model.generate import ReadPrompt
    from prism_lm.parallel.mesh import Ranks


def main(arguments: list[str]) -> int:
    """Print each sample, its prompt first; a line of three dashes stands between samples."""
    parsed = build_parser().parse_args(arguments)
    _check(parsed)
    environment = detect_environment(os.environ)
    apply_environment(environment)
    texts = generate_texts(parsed, environment.ranks)
    if environment.ranks.is_main:
        print("\n---\n".join(texts))
    return 0


def generate_texts(parsed: argparse.Namespace, ranks: "Ranks") -> list[str]:
    """The samples, the same on every rank: all of them read the prompt together, then each takes every step."""
    from launcher.trained_run import all_ranks, find_run, load_model
    from prism_lm.parallel.collectives import broadcast_object, call_together

    run = find_run(Path(parsed.run), kernels=parsed.kernels, ranks=ranks)
    with all_ranks(ranks):
        prompt = broadcast_object(sys.stdin.read() if parsed.prompt == "-" and ranks.is_main else parsed.prompt)
        trained = call_together(lambda: load_model(run))
        return continue_prompts(
            trained,
            [prompt] * parsed.samples,
            max_new_tokens=parsed.max_new_tokens,
            temperature=parsed.temperature,
            top_k=parsed.top_k,
            top_p=parsed.top_p,
            seed=parsed.seed,
            read_prompt=_cut_prompts(trained, ranks),
        )


def _cut_prompts(run: "TrainedRun", ranks: "Ranks") -> "ReadPrompt | None":
    """How all ranks read prompts together, a slice each; None where one process is alone."""
    from launcher.trained_run import share_weights
    from prism_lm.parallel.apply import apply_to_operators
    from prism_lm.parallel.prompt import read_prompt

    if ranks.world_size == 1:
        return None
    ranks = replace(ranks, sequence_degree=ranks.world_size)
    return partial(read_prompt, share_weights(run.model, apply_to_operators(run.operators, ranks)), ranks)


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
    read_prompt: "ReadPrompt | None" = None,
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
        read_prompt=read_prompt,
    )
    decoded = (run.tokenizer.decode(tokens) for tokens in continuations)
    return [prompt + text for prompt, text in zip(prompts, decoded, strict=True)]
