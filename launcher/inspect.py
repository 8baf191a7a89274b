"""`prism inspect PATH`: rows of prepared data as text, with the boundaries of documents.

`--verify` checks the size and hash of every file instead.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.manifest import MANIFEST_NAME, SPLITS, Split, read_manifest

EXAMPLE = """\
example:
  prism inspect data/plain_text --split validation --rows 2
  prism inspect data/plain_text --verify
"""


def main(arguments: list[str]) -> int:
    """Print rows, or the result of the check; 0 when all is sound."""
    parsed = build_parser().parse_args(arguments)
    if parsed.verify:
        return verify(parsed.path)
    show_rows(parsed.path, split=parsed.split, first=parsed.first, count=parsed.rows)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this verb."""
    parser = argparse.ArgumentParser(
        prog="prism inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLE
    )
    parser.add_argument("path", metavar="PATH", help="folder or URL written by `prism prepare`")
    parser.add_argument("--verify", action="store_true", help="check size and hash of every file of a folder")
    parser.add_argument("--split", choices=SPLITS, default="train", help="split to show (default: train)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first row (default: 0)")
    parser.add_argument("--rows", type=int, default=3, metavar="N", help="how many rows (default: 3)")
    return parser


def verify(path: str) -> int:
    """Check a prepared folder. Raises DataError naming every bad file."""
    from data_pipeline.preflight import is_url, verify_folder

    if is_url(path):
        raise ValueError(f"PATH={path} must be a folder for --verify; shards of a URL are checked as they are read")
    folder = Path(path)
    manifest = read_manifest(folder / MANIFEST_NAME)
    count = verify_folder(folder)
    print(f"{folder}: {count} files match their sizes and hashes; fingerprint {manifest.fingerprint[:16]}")
    return 0


def show_rows(path: str, *, split: Split, first: int, count: int) -> None:
    """Print rows first..first+count-1 of a split."""
    from data_pipeline.dataset import ShardCache
    from data_pipeline.preflight import open_prepared_data
    from data_pipeline.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory(prefix="prism-inspect-") as cache_dir:
        data = open_prepared_data(path, split, cache_dir=Path(cache_dir), verify="sizes", timeout_s=45.0)
        sources = data.manifest.sources(split)
        total = sum(held.rows for held in sources.values())
        if not 0 <= first < total:
            raise ValueError(f"--first={first} must be a row of the {split} split, 0 to {total - 1}; use --first 0")
        tokenizer = load_tokenizer(data.cache)
        cache = ShardCache(data, split, cache_limit_bytes=0, timeout_s=45.0)
        for row in range(first, min(first + count, total)):
            print(f"row {row} of {total} ({split}, {find_source(sources, row)})")
            print(describe_row(cache.read_row(row), tokenizer) + "\n")


def find_source(sources: dict[str, Any], row: int) -> str:
    """Return the source that holds a row of the split."""
    for source, held in sources.items():
        if row < held.rows:
            return source
        row -= held.rows
    raise DataError(f"no source holds row {row}")


def describe_row(row: Any, tokenizer: Any) -> str:
    """Return a row as text, a paragraph a document, saying where each begins and ends, and the padding."""
    from data_pipeline.packing import split_documents

    lines: list[str] = []
    shown = 0
    for part in split_documents(row, tokenizer.bos_id):
        pieces = [int(piece) for piece in part]
        begins, ends = pieces[0] == tokenizer.bos_id, pieces[-1] == tokenizer.eos_id
        shown += len(pieces)
        text = tokenizer.decode(pieces).replace("\n", "\n    ")
        lines.append(f"  [document {'begins' if begins else 'goes on'}, {len(pieces)} tokens]")
        lines.append(f"    {text}")
        lines.append(f"  [document {'ends' if ends else 'goes on in the next row'}]")
    if shown < len(row):
        lines.append(f"  [{len(row) - shown} tokens of padding]")
    return "\n".join(lines)
