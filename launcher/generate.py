"""`prism generate RUN`: text from the newest checkpoint of a run.

One prompt, its continuation shown as it comes where standard output is a terminal; --interactive, a prompt a line;
--prompts FILE --output OUT.jsonl, a file of prompts in batches, which goes on where it was cut off.

The recurrent layers read a prompt in pieces by the chunk form and then take one step a token, at constant memory; on
CUDA the step is one graph. A prompt too long for one GPU is cut over several:
`torchrun --nproc-per-node N -m launcher generate RUN --prompt -`.
"""

import argparse
import math
import os
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from launcher.environment import apply_environment, detect_environment
from launcher.generate_batch import begin_output, continue_file, read_prompts
from launcher.generate_stream import converse, read_text, stream_text
from launcher.help_text import add_kernels_option, add_precision_option
from launcher.run_folder import find_existing

if TYPE_CHECKING:
    from launcher.continuation import Continuer, Settings
    from launcher.trained_run import SavedRun, TrainedRun
    from prism_lm.model.generate import ReadPrompt
    from prism_lm.parallel.mesh import Ranks

DEFAULT_BATCH_SIZE = 16
MAX_SEED = 2**62


def main(arguments: list[str]) -> int:
    """Print each sample, its prompt first; a line of three dashes stands between samples. Speeds go to stderr."""
    parsed = build_parser().parse_args(arguments)
    environment = detect_environment(os.environ)
    _check_numbers(parsed)
    _check_combination(parsed, environment.ranks.world_size)
    apply_environment(environment)
    if parsed.interactive:
        converse(_load(parsed, _find(parsed)), seed=parsed.seed, quiet=parsed.quiet)
    elif parsed.prompts:
        _continue_file(parsed)
    else:
        is_main = environment.ranks.is_main
        is_streamed = parsed.stream or (parsed.samples == 1 and sys.stdout.isatty())
        texts = generate_texts(parsed, environment.ranks, stream=sys.stdout if is_streamed and is_main else None)
        if is_main and not is_streamed:
            print("\n---\n".join(texts))
    return 0


def generate_texts(parsed: argparse.Namespace, ranks: "Ranks", *, stream: TextIO | None = None) -> list[str]:
    """The samples, the same on every rank: all of them read the prompt together, then each takes every step. The only
    sample is written to `stream` as it comes."""
    from launcher.continuation import Continuer
    from launcher.trained_run import all_ranks, choose_dtype, load_model
    from prism_lm.parallel.apply import check_mixers
    from prism_lm.parallel.collectives import broadcast_object, call_together

    run = _find(parsed, ranks)
    check_mixers(run.config.model, ranks.world_size, key="WORLD_SIZE")
    given = _read_prompt(parsed, ranks)
    with all_ranks(ranks):
        prompt = broadcast_object(given)
        trained = call_together(lambda: load_model(run, dtype=choose_dtype(run, parsed.precision)))
        continuer = Continuer(
            trained,
            _read_settings(parsed),
            cuda_graph=not parsed.no_cuda_graph,
            read_prompt=_cut_prompts(trained, ranks),
        )
        if stream is None:
            seeds = [parsed.seed + sample for sample in range(parsed.samples)]
            texts = [prompt + one.text for one in continuer.continue_batch([prompt] * parsed.samples, seeds)]
        else:
            stream.write(prompt)
            texts = [prompt + stream_text(continuer, prompt, parsed.seed, stream)]
    if ranks.is_main and not parsed.quiet:
        print(continuer.take_speed().describe(), file=sys.stderr)
    return texts


def _read_prompt(parsed: argparse.Namespace, ranks: "Ranks") -> str:
    """The prompt, on rank 0; it is read before any process group starts, so that one that is no text ends in a line."""
    if parsed.prompt != "-" or not ranks.is_main:
        return parsed.prompt or ""
    return read_text("--prompt=-", sys.stdin.read)


def _cut_prompts(run: "TrainedRun", ranks: "Ranks") -> "ReadPrompt | None":
    """How all ranks read prompts together, a slice each; None where one process is alone."""
    from launcher.trained_run import share_weights
    from prism_lm.parallel.apply import apply_to_operators
    from prism_lm.parallel.prompt import read_prompt

    if ranks.world_size == 1:
        return None
    ranks = replace(ranks, sequence_degree=ranks.world_size)
    return partial(read_prompt, share_weights(run.model, apply_to_operators(run.operators, ranks)), ranks)


def _find(parsed: argparse.Namespace, ranks: "Ranks | None" = None) -> "SavedRun":
    from launcher.trained_run import find_run
    from prism_lm.model.peer_rules import refuse_peer

    run = find_run(Path(parsed.run), kernels=parsed.kernels, ranks=ranks)
    refuse_peer(run.config.model, f"prism generate {parsed.run}", "use prism evaluate, or a run of another mixer")
    return run


def _load(parsed: argparse.Namespace, run: "SavedRun") -> "Continuer":
    from launcher.continuation import Continuer
    from launcher.trained_run import choose_dtype, load_model

    trained = load_model(run, dtype=choose_dtype(run, parsed.precision))
    return Continuer(trained, _read_settings(parsed), cuda_graph=not parsed.no_cuda_graph)


def _continue_file(parsed: argparse.Namespace) -> None:
    """Continue every prompt of the file of which the output has no line yet."""
    from launcher.trained_run import choose_dtype

    records, output = read_prompts(Path(parsed.prompts)), Path(parsed.output)
    run = _find(parsed)
    names = {"run": parsed.run, "step": run.step, "precision": str(choose_dtype(run, parsed.precision))}
    settings = {**names, "seed": parsed.seed, **asdict(_read_settings(parsed))}
    first = begin_output(output, records, {**settings, "stops": parsed.stop})
    if first:
        what_now = "nothing is left to do" if first == len(records) else "going on after them"
        print(f"--output={output} holds {first} of {len(records)} continuations; {what_now}", file=sys.stderr)
    if first == len(records):
        return
    continuer = _load(parsed, run)
    continue_file(
        records,
        [len(continuer.encode(record["prompt"])) for record in records],
        output,
        first=first,
        batch_size=parsed.batch_size or DEFAULT_BATCH_SIZE,
        continue_batch=lambda prompts, places: continuer.continue_batch(
            prompts, [parsed.seed + place for place in places]
        ),
    )
    if not parsed.quiet:
        print(continuer.take_speed().describe(), file=sys.stderr)


def _read_settings(parsed: argparse.Namespace) -> "Settings":
    from launcher.continuation import Settings

    return Settings(
        max_new_tokens=parsed.max_new_tokens,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
        top_p=parsed.top_p,
        stops=tuple(parsed.stop),
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run that has saved a checkpoint")
    parser.add_argument("--prompt", metavar="TEXT", help="to continue; - reads it from standard input (default: none)")
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="how many continuations, as one batch (default %(default)s)"
    )
    words = "show the continuation as it comes; one sample on a terminal is shown so anyway"
    parser.add_argument("--stream", action="store_true", help=words)
    words = "continue one line of standard input after another; an empty line ends it, Ctrl-C one continuation"
    parser.add_argument("--interactive", action="store_true", help=words)
    _add_file_options(parser)
    _add_sampling_options(parser)
    parser.add_argument("--quiet", action="store_true", help="leave out the line about tokens/s on standard error")
    add_precision_option(parser)
    add_kernels_option(parser)
    parser.add_argument("--no-cuda-graph", action="store_true", help="launch every kernel of a step by itself")
    return parser


def _add_file_options(parser: argparse.ArgumentParser) -> None:
    words = 'a prompt a line, or, in a .jsonl file, objects with the key "prompt", whose other keys are kept'
    parser.add_argument("--prompts", metavar="FILE", help=words)
    words = (
        "with --prompts: where to write a JSON line for each prompt, in their order: prompt, text, num_new_tokens, "
        "finish_reason (stop or length). Started again with the same arguments it goes on after the lines there"
    )
    parser.add_argument("--output", metavar="OUT.jsonl", help=words)
    words = f"with --prompts: prompts at a time; it changes no text but by rounding (default {DEFAULT_BATCH_SIZE})"
    parser.add_argument("--batch-size", type=int, metavar="N", help=words)


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    words = "longest continuation (default %(default)s)"
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help=words)
    words = "0 takes the likeliest token (default %(default)s)"
    parser.add_argument("--temperature", type=float, default=0.8, help=words)
    words = "sample among the k likeliest; 0 for all (default %(default)s)"
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help=words)
    words = "sample within this probability (default %(default)s)"
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help=words)
    words = "end a continuation before this text; may be given several times"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=words)
    words = "the same seed gives the same text; sample, line or prompt n of several has seed + n (default %(default)s)"
    parser.add_argument("--seed", type=int, default=0, help=words)


def _check_numbers(parsed: argparse.Namespace) -> None:
    for key, example in (("samples", 3), ("max_new_tokens", 200), ("batch_size", 16)):
        value, option = getattr(parsed, key), "--" + key.replace("_", "-")
        if value is not None and value < 1:
            raise ValueError(f"{option}={value} must be at least 1; for example {option} {example}")
    if not (parsed.temperature >= 0 and math.isfinite(parsed.temperature)):
        raise ValueError(f"--temperature={parsed.temperature} must be at least 0; use 0 for the likeliest token")
    if parsed.top_k < 0:
        raise ValueError(f"--top-k={parsed.top_k} must be at least 0; use 0 for all tokens")
    if not 0 < parsed.top_p <= 1:
        raise ValueError(f"--top-p={parsed.top_p} must be above 0 and at most 1; use 1 for all tokens")
    if not 0 <= parsed.seed <= MAX_SEED:
        raise ValueError(f"--seed={parsed.seed} must be from 0 to {MAX_SEED}; for example --seed 1")
    if "" in parsed.stop:
        raise ValueError("--stop= must be a text; for example --stop '###'")
    for option, text in [("--prompt", parsed.prompt or ""), *(("--stop", stop) for stop in parsed.stop)]:
        read_text(f"{option}={text[:40]!a}", partial(str, text))


def _check_combination(parsed: argparse.Namespace, world_size: int) -> None:
    """Which ways of asking go together, before anything is loaded."""
    way = "--interactive" if parsed.interactive else "--prompts" if parsed.prompts else None
    given = [name for name in ("prompt", "prompts", "output", "batch_size", "stream") if getattr(parsed, name)]
    given += ["samples"] if parsed.samples != 1 else []
    allowed = {"--interactive": set[str](), "--prompts": {"prompts", "output", "batch_size"}}
    fitting = allowed[way] if way else {"prompt", "samples", "stream"}
    for name in given:
        if name not in fitting:
            rule = f"must not be given with {way}" if way else "must be given with --prompts"
            remedy = "leave it out" if way else "for example --prompts in.txt --output out.jsonl"
            value = "" if name == "stream" else f"={getattr(parsed, name)}"
            raise ValueError(f"--{name.replace('_', '-')}{value} {rule}; {remedy}")
    if way and world_size > 1:
        raise ValueError(f"WORLD_SIZE={world_size} must be 1 with {way}; start prism generate without torchrun")
    if parsed.stream and parsed.samples != 1:
        raise ValueError(f"--samples={parsed.samples} must be 1 with --stream; leave one of them out")
    if way == "--prompts":
        _check_files(parsed)


def _check_files(parsed: argparse.Namespace) -> None:
    if not parsed.output:
        raise ValueError(f"--prompts={parsed.prompts} must be given with --output; for example --output out.jsonl")
    source, output = Path(parsed.prompts), Path(parsed.output)
    try:
        if not source.is_file():
            raise ValueError(f"--prompts={source} must be a file; write a prompt a line, or .jsonl objects")
        _check_output(output, source)
    except OSError as error:
        raise ValueError(
            f"--prompts={source} and --output={output} must lie where files can be looked at ({error.strerror}); "
            "give other ones"
        ) from error


def _check_output(output: Path, source: Path) -> None:
    folder = output.resolve().parent
    nearest = find_existing(folder)
    if not nearest.is_dir():
        raise ValueError(f"--output={output} must lie in a folder, which {nearest} is not; give another file")
    if not folder.is_dir():
        raise ValueError(f"--output={output} must lie in a folder that exists; make {output.parent} first")
    if output.is_dir() or (output.exists() and output.samefile(source)):
        raise ValueError(f"--output={output} must be a file other than --prompts; for example --output out.jsonl")


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
    from launcher.continuation import Continuer, Settings

    settings = Settings(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    seeds = [seed + row for row in range(len(prompts))]
    continuations = Continuer(run, settings).continue_batch(prompts, seeds)
    return [prompt + one.text for prompt, one in zip(prompts, continuations, strict=True)]
