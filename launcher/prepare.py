"""`prism prepare [CONFIG] [key=value ...]`: text to a tokenizer and shards of token rows.

Runs in parallel processes, goes on where a killed run stopped, and does nothing where it is done.
"""

import argparse
import sys

from data_pipeline.config import PrepareConfig
from launcher.config import load_config
from launcher.help_text import describe_config

EXAMPLE = """\
example:
  prism prepare output=data/books inputs.books=/texts/books vocab_size=8192 row_tokens=512
  prism prepare configs/data/slimpajama.yaml inputs.slimpajama=/datasets/SlimPajama-627B
"""


def main(arguments: list[str]) -> int:
    """Prepare and print the summary; 0 when the folder is complete."""
    parsed = build_parser().parse_args(arguments)
    overrides: list[str] = parsed.overrides
    path: str | None = parsed.config
    if path is not None and "=" in path:
        path, overrides = None, [path, *overrides]
    config = load_config(PrepareConfig, path, overrides)

    from data_pipeline.prepare import run_prepare, summarize

    manifest = run_prepare(config, report=lambda line: print(line, file=sys.stderr, flush=True))
    print(summarize(manifest))
    print(f"\n{config.output}: {manifest.vocab_size} pieces, rows of {manifest.row_tokens} tokens ({manifest.dtype})")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this verb."""
    parser = argparse.ArgumentParser(
        prog="prism prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{EXAMPLE}\nkeys (write key=value):\n" + describe_config(PrepareConfig),
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file; the shipped ones are in configs/data/")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="set one key")
    return parser
