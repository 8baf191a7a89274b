"""Parts of mosaicml-streaming come without the whole, and the whole can still come after them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_fresh(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_that_reads_shards_imports_neither_transformers_nor_the_librarys_own_data_sets() -> None:
    program = """
import sys
import data_pipeline.dataset, data_pipeline.loader, data_pipeline.order, data_pipeline.preflight
from data_pipeline.streaming_parts import importing_parts
with importing_parts():
    from streaming.base.format import MDSWriter, reader_from_json
    from streaming.base.hashing import get_hash
    from streaming.base.shuffle import get_shuffle
    from streaming.base.storage import CloudDownloader
    from streaming.base.stream import Stream
unwanted = "transformers", "sklearn", "streaming", "streaming.text", "streaming.base"
print(*(name for name in unwanted if name in sys.modules))
"""
    assert run_fresh(program).split() == []


def test_the_whole_library_imported_later_has_the_same_parts() -> None:
    program = """
from data_pipeline.streaming_parts import importing_parts
with importing_parts():
    from streaming.base.stream import Stream
import streaming
assert streaming.Stream is Stream and streaming.StreamingDataset.__mro__
with importing_parts():
    from streaming.base.format import MDSWriter
assert streaming.MDSWriter is MDSWriter
import sys
print(sys.modules["streaming"] is streaming)
"""
    assert run_fresh(program) == "True\n"
