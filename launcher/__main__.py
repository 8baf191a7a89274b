"""`prism VERB ...`: one console command; a verb's module is imported only when that verb is asked for."""

import difflib
import importlib
import os
import sys
import traceback
from dataclasses import dataclass

EXIT_FAILED, EXIT_USAGE = 1, 2
OUR_PACKAGES = ("launcher", "prism_lm", "data_pipeline", "kernels")


@dataclass(frozen=True)
class Verb:
    """One line of the command's table of contents."""

    summary: str
    example: str
    module: str = ""
    "In launcher/, where its name is not the verb's."


VERBS = {
    "demo": Verb("see everything work on this machine in minutes", "prism demo"),
    "doctor": Verb("what this machine has, lacks, and what that means", "prism doctor"),
    "sizes": Verb("layers, widths, parameters, FLOPs, memory of the named sizes", "prism sizes"),
    "prepare": Verb("text to tokens to shards", "prism prepare configs/data/plain_text.yaml"),
    "inspect": Verb("rows of prepared data as text; verify every shard", "prism inspect data/plain_text --verify"),
    "order": Verb("the order of samples for any world size", "prism order data/plain_text --world-size 4"),
    "preflight": Verb("look at every node before a run does", "prism preflight configs/train/tiny.yaml"),
    "train": Verb("train a model, or resume an existing run folder", "prism train configs/train/tiny.yaml"),
    "sweep": Verb(
        "train a study's runs, skip finished ones, tabulate over seeds",
        "prism sweep configs/ablation/all.yaml base=configs/train/tiny.yaml --dry-run",
    ),
    "scaling": Verb(
        "plan runs on equal budgets, fit and predict losses, report", "prism scaling plan configs/scaling/tiny.yaml"
    ),
    "probe": Verb(
        "nine mechanistic tasks: small models of equal size compared, with intervals",
        "prism probe --all --seeds 0 1 2",
    ),
    "submit": Verb(
        "check a run and hand it to SLURM", "prism submit configs/train/tiny.yaml --ranks-per-node 2 --dry-run"
    ),
    "status": Verb("how runs stand, why each start ended, what was saved", "prism status runs/tiny"),
    "checkpoint": Verb("list, verify, prune or convert a run's checkpoints", "prism checkpoint verify runs/tiny"),
    "bench": Verb("time whole training steps on random tokens", "prism bench configs/train/tiny.yaml --batch 2x256"),
    "evaluate": Verb("bits per byte on held-out text, or lm-eval's tasks", "prism evaluate runs/tiny --split test"),
    "generate": Verb(
        "text from a trained run, typed, streamed or by files", "prism generate runs/tiny --prompt 'It was'"
    ),
    "export": Verb("a run as a Hugging Face folder, proved by loading it back", "prism export runs/tiny exported/tiny"),
    "import": Verb("a run folder from an exported one", "prism import exported/tiny runs/again", module="import_model"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0 done, 1 failed, 2 something typed is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(VERBS)}"
        return _fail(f"prism {verb} must be a verb; {hint}", EXIT_USAGE)
    return _run(verb, rest)


def _run(verb: str, arguments: list[str]) -> int:
    try:
        code = importlib.import_module(f"launcher.{VERBS[verb].module or verb}").main(arguments)
        sys.stdout.flush()
        return code
    except (ValueError, RuntimeError) as error:
        if not _is_our_message(error):
            raise
        code = EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILED
        return _fail(str(error), code, is_said_here=getattr(error, "is_said_here", False))
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_FAILED)
    except BrokenPipeError:  # the reader, such as `head`, has had enough; keep Python from saying so again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _is_our_message(error: Exception) -> bool:
    """Whether the error was written for the user: raised by our own code, and of a class with a meaning of ours."""
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    raised_in, defined_in = frame.f_globals.get("__name__", ""), type(error).__module__
    where = raised_in if isinstance(error, ValueError) else defined_in
    return where.split(".")[0] in OUR_PACKAGES


def _fail(message: str, code: int, *, is_said_here: bool = False) -> int:
    """Every rank finds the same error in what was typed; rank 0 alone says it. Some errors are one rank's own."""
    if is_said_here or os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr)
    return code


def _overview() -> str:
    lines = ["prism: pretrain PRISM language models", "", "usage: prism VERB ...   (prism VERB --help says more)", ""]
    for name, verb in VERBS.items():
        lines += [f"  {name:<12}{verb.summary}", f"  {'':<12}  $ {verb.example}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
