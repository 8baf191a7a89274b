import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from launcher import demo_text
from launcher.demo_text import fetch_demo_text


def write_r_database(file: Path, vectors: list[list[str]]) -> None:
    """Vectors of strings as R stores them: format version 3, XDR, one zlib stream each behind its length."""
    file.parent.mkdir(parents=True)
    with file.open("wb") as stream:
        for lines in vectors:
            block = b"X\n" + struct.pack(">iiii", 3, 0x040201, 0x030500, 5) + b"UTF-8"
            block += struct.pack(">ii", demo_text.R_STRING_VECTOR, len(lines))
            for line in lines:
                encoded = line.encode()
                block += struct.pack(">ii", 0x40000 | demo_text.R_STRING, len(encoded)) + encoded
            stream.write(struct.pack(">I", len(block)) + zlib.compress(block))


def test_novels_are_cut_in_chapters_and_their_paragraphs_unwrapped(tmp_path: Path) -> None:
    novel = [
        "TITLE",
        "",
        "",
        "CHAPTER I",
        "",
        "It was",
        "late — very.",
        "",
        "She left.",
        "",
        "",
        "Chapter 2",
        "",
        "End.",
    ]
    write_r_database(tmp_path / "data" / "Rdata.rdb", [novel, ["Other"]])
    assert list(demo_text._read_austen(tmp_path)) == [
        "TITLE",
        "CHAPTER I\n\nIt was late — very.\n\nShe left.",
        "Chapter 2\n\nEnd.",
        "Other",
    ]


def test_pages_become_sections_of_paragraphs_without_markup(tmp_path: Path) -> None:
    page = (
        "<html><head><title>no</title></head><body><h1>One</h1><p>a &amp; <b>b</b>\n c</p><h2>Two</h2><p>d</p></body>"
    )
    (tmp_path / "page.html").write_text(page)
    assert [text for text in demo_text._read_html_sections(tmp_path) if text] == ["One\n\na & b c", "Two\n\nd"]


def test_without_apt_the_manuals_of_python_are_used_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(command: list[str], folder: Path) -> None:
        raise FileNotFoundError("apt-get: not found")

    monkeypatch.setattr(demo_text, "_run", refuse)
    sources = fetch_demo_text(tmp_path / "text")
    assert list(sources) == ["python_docs"]
    assert sum(file.stat().st_size for file in sources["python_docs"].iterdir()) > 1_000_000
    assert "apt-get: not found" in capsys.readouterr().out
    monkeypatch.setattr(demo_text, "_fetch_from_debian", lambda folder: pytest.fail("fetched twice"))
    assert fetch_demo_text(tmp_path / "text") == sources


def test_interrupted_fetch_leaves_no_text_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(command: list[str], folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_text, "_run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_demo_text(tmp_path / "text")
    assert not (tmp_path / "text").exists()


def test_apt_runs_in_the_given_folder_with_an_absolute_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def record(command: list[str], folder: Path) -> None:
        assert folder.is_absolute()
        commands.append(command)
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(demo_text, "_run", record)
    monkeypatch.setattr(demo_text, "_read_python_documentation", lambda: iter(["word " * 200]))
    monkeypatch.chdir(tmp_path)
    fetch_demo_text(Path("demo/text"))
    assert [word for word in commands[0] if word.startswith("-oDir::State::Lists=/")]
