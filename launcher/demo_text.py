"""Real English text for the demo: Debian packages fetched without root, or the manuals that Python itself carries.

Each source becomes a folder of `.txt` files, one document a file: Jane Austen's novels by chapter (public domain) and
An Anarchist FAQ by section (GFDL or CC-BY-SA). Where there is no apt, the documentation that ships inside Python.
"""

import ast
import html.parser
import re
import shutil
import struct
import subprocess
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

DEBIAN_PACKAGES = {"austen": "r-cran-janeaustenr", "faq": "anarchism"}
FETCH_TIMEOUT_S = 300
MIN_DOCUMENT_CHARACTERS = 500
R_STRING, R_STRING_VECTOR = 9, 16


def fetch_demo_text(folder: Path) -> dict[str, Path]:
    """Source name to its folder of text files, fetched on the first call and reused afterwards.

    Published by rename, so that an interrupted fetch leaves nothing half done behind.
    """
    if not folder.is_dir():
        beside = folder.with_name(folder.name + ".partial")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            _fetch_from_debian(beside)
        except (OSError, subprocess.SubprocessError, zlib.error, struct.error) as error:
            print(f"   no Debian packages here ({_last_line(error)}); using the documentation that ships with Python")
            shutil.rmtree(beside)
            _write_documents(beside / "python_docs", _read_python_documentation())
        beside.rename(folder)
    return {source.name: source for source in sorted(folder.iterdir())}


def _fetch_from_debian(folder: Path) -> None:
    readers = {"austen": _read_austen, "faq": _read_html_sections}
    for source, package in DEBIAN_PACKAGES.items():
        _write_documents(folder / source, readers[source](_unpack_package(package, folder.with_name("packages"))))


def _unpack_package(package: str, cache: Path) -> Path:
    """Download with an apt state of our own, so that neither root nor an up-to-date system index is needed."""
    cache = cache.resolve()
    lists = cache / "lists"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    options = ["-q", f"-oDir::State::Lists={lists}", f"-oDir::Cache={cache}", "-oAPT::Sandbox::User="]
    if not any(lists.glob("*Packages*")):
        _run(["apt-get", *options, "update"], cache)
    _run(["apt-get", *options, "download", package], cache)
    archive = max(cache.glob(f"{package}_*.deb"), default=cache / f"{package}.deb")
    unpacked = cache / package
    _run(["dpkg-deb", "-x", str(archive), str(unpacked)], cache)
    return unpacked


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)


def _last_line(error: Exception) -> str:
    output = getattr(error, "stderr", None)
    return output.strip().splitlines()[-1] if output else str(error)


def _write_documents(folder: Path, documents: Iterator[str]) -> None:
    folder.mkdir(parents=True)
    kept = (text for text in documents if len(text) >= MIN_DOCUMENT_CHARACTERS)
    for index, text in enumerate(kept):
        (folder / f"{index:05d}.txt").write_text(text, encoding="utf-8")
    if not any(folder.iterdir()):
        raise OSError(f"no text found for {folder.name}")


def _read_austen(package: Path) -> Iterator[str]:
    """Chapters, paragraphs unwrapped, from the package's lazy-load database of R string vectors."""
    for database in package.rglob("Rdata.rdb"):
        for lines in _read_r_string_vectors(database.read_bytes()):
            novel = re.sub(r"(?<!\n)\n(?!\n)", " ", "\n".join(lines))
            novel = re.sub(r"\n{3,}", "\n\n", novel)
            yield from (chapter.strip() for chapter in re.split(r"\n\n(?=chapter\b)", novel, flags=re.IGNORECASE))


def _read_r_string_vectors(database: bytes) -> Iterator[list[str]]:
    """Blocks of a 4-byte length and a zlib stream, each the XDR serialisation of one vector of strings."""
    offset = 0
    while offset < len(database):
        stream = zlib.decompressobj()
        block = stream.decompress(database[offset + 4 :])
        offset = len(database) - len(stream.unused_data)
        yield list(_read_r_strings(block))


def _read_r_strings(block: bytes) -> Iterator[str]:
    """Format version 3: `X\\n`, three version words, the native encoding, then the vector."""
    (encoding_bytes,) = struct.unpack_from(">i", block, 14)
    offset = 18 + encoding_bytes
    flags, count = struct.unpack_from(">ii", block, offset)
    if flags & 0xFF != R_STRING_VECTOR:
        return
    offset += 8
    for _ in range(count):
        flags, num_bytes = struct.unpack_from(">ii", block, offset)
        if flags & 0xFF != R_STRING:
            raise OSError(f"element type {flags & 0xFF} in a vector of strings")
        yield block[offset + 8 : offset + 8 + num_bytes].decode("utf-8", errors="replace")
        offset += 8 + max(num_bytes, 0)


class _PlainText(html.parser.HTMLParser):
    """The words of a page's body; block elements become paragraph breaks, headings form feeds."""

    BLOCKS = frozenset({"p", "li", "blockquote", "div", "tr", "br"})
    HEADINGS = frozenset({"h1", "h2", "h3", "h4"})
    HIDDEN = frozenset({"head", "script", "style"})

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in self.HIDDEN
        if tag in self.HEADINGS:
            self.pieces.append("\f")
        elif tag in self.BLOCKS:
            self.pieces.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in self.HIDDEN

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.pieces.append(re.sub(r"\s+", " ", data))


def _read_html_sections(package: Path) -> Iterator[str]:
    for page in sorted(package.rglob("*.html")):
        parser = _PlainText()
        parser.feed(page.read_text(encoding="utf-8", errors="replace"))
        for section in "".join(parser.pieces).split("\f"):
            paragraphs = (paragraph.strip() for paragraph in section.split("\n\n"))
            yield "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _read_python_documentation() -> Iterator[str]:
    """The language reference that `help()` shows, and the docstrings of the standard library."""
    from pydoc_data.topics import topics  # pyright: ignore[reportUnknownVariableType]

    yield from topics.values()
    library = Path(sysconfig.get_paths()["stdlib"])
    for module in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        try:
            tree = ast.parse(module.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        definitions = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docs = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, definitions)]
        yield "\n\n".join(text for text in docs if text)
