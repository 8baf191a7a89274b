import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from launcher import generate
from launcher.__main__ import EXIT_USAGE, main
from tests.harness import build_rank_environment
from tests.launcher.trained_folders import write_trained_run

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained_run(tmp_path_factory.mktemp("runs") / "small")


def print_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["generate", *arguments]) == 0
    return capsys.readouterr()


def test_streamed_text_is_the_text_printed_at_once(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(4):
        arguments = [str(run_dir), "--prompt", "the cat", "--max-new-tokens", "40", "--seed", str(seed)]
        whole, _ = print_text(capsys, *arguments)
        assert print_text(capsys, *arguments, "--stream")[0] == whole and whole.startswith("the cat")


class Terminal(io.StringIO):
    """Notes each part as it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.parts.append(text)
        return super().write(text)


def test_terminal_is_shown_one_sample_as_it_comes_and_several_at_once(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["generate", str(run_dir), "--prompt", "the", "--max-new-tokens", "20", "--quiet"]
    terminals = []
    for samples in ("1", "2"):
        terminals.append(Terminal())
        monkeypatch.setattr(sys, "stdout", terminals[-1])
        assert main([*arguments, "--samples", samples]) == 0
    one, two = terminals
    assert len(one.parts) > 5 and one.parts[0] == "the" and one.parts[-1] == "\n"
    assert two.getvalue().split("\n---\n")[0] + "\n" == one.getvalue() and len(two.parts) <= 2


def test_samples_differ_and_the_first_is_the_only_one(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(run_dir), "--prompt", "the", "--max-new-tokens", "12"]
    samples = print_text(capsys, *arguments, "--samples", "3")[0].removesuffix("\n").split("\n---\n")
    assert len(set(samples)) == 3
    assert print_text(capsys, *arguments)[0] == samples[0] + "\n"
    assert print_text(capsys, *arguments, "--seed", "2")[0] == samples[2] + "\n"


def test_speeds_are_said_on_standard_error_unless_quiet(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(run_dir), "--prompt", "the", "--max-new-tokens", "5", "--samples", "2", "--temperature", "0"]
    _, said = print_text(capsys, *arguments)
    assert said.startswith("prompts: ") and "; new: 10 tokens in " in said and said.count("tokens/s") == 2
    assert print_text(capsys, *arguments, "--quiet")[1] == ""


def test_prompt_is_read_from_standard_input(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\nand"))
    arguments = [str(run_dir), "--max-new-tokens", "5", "--quiet"]
    read = print_text(capsys, *arguments, "--prompt", "-")
    assert read == print_text(capsys, *arguments, "--prompt", "the cat\nand")


def test_text_ends_before_any_of_the_stop_strings(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(run_dir), "--max-new-tokens", "40", "--quiet"]
    free = print_text(capsys, *arguments)[0].removesuffix("\n")
    stops = [free[6:8], free[20:23]]
    options = [part for stop in stops for part in ("--stop", stop)]
    expected = min((free.split(stop)[0] for stop in stops), key=len) + "\n"
    assert (
        print_text(capsys, *arguments, *options)[0]
        == expected
        == print_text(capsys, *arguments, *options, "--stream")[0]
    )


def test_bf16_is_what_precision_asks_for(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(run_dir), "--max-new-tokens", "60", "--quiet"]
    texts = [print_text(capsys, *arguments, "--precision", precision)[0] for precision in ("auto", "fp32", "bf16")]
    assert texts[0] == texts[1] != texts[2]


CONVERT = "set the terminal to UTF-8, or turn the text into it, such as with iconv -f LATIN1 -t UTF-8"
WRONG = {
    "--samples 0": "--samples=0 must be at least 1; for example --samples 3",
    "--max-new-tokens 0": "--max-new-tokens=0 must be at least 1; for example --max-new-tokens 200",
    "--temperature -1": "--temperature=-1.0 must be at least 0; use 0 for the likeliest token",
    "--temperature nan": "--temperature=nan must be at least 0; use 0 for the likeliest token",
    "--top-k -1": "--top-k=-1 must be at least 0; use 0 for all tokens",
    "--top-p 1.5": "--top-p=1.5 must be above 0 and at most 1; use 1 for all tokens",
    "--seed -1": f"--seed=-1 must be from 0 to {generate.MAX_SEED}; for example --seed 1",
    "--stop=": "--stop= must be a text; for example --stop '###'",
    "--stream --samples 2": "--samples=2 must be 1 with --stream; leave one of them out",
    "--batch-size 0 --prompts x": "--batch-size=0 must be at least 1; for example --batch-size 16",
    "--batch-size 4": "--batch-size=4 must be given with --prompts; for example --prompts in.txt --output out.jsonl",
    "--output x": "--output=x must be given with --prompts; for example --prompts in.txt --output out.jsonl",
    "--interactive --prompt x": "--prompt=x must not be given with --interactive; leave it out",
    "--interactive --prompts x": "--prompts=x must not be given with --interactive; leave it out",
    "--interactive --samples 2": "--samples=2 must not be given with --interactive; leave it out",
    "--prompts x --output y --prompt z": "--prompt=z must not be given with --prompts; leave it out",
    "--prompts x --output y --stream": "--stream must not be given with --prompts; leave it out",
    "--prompts x": "--prompts=x must be given with --output; for example --output out.jsonl",
    "--prompts x --output y": "--prompts=x must be a file; write a prompt a line, or .jsonl objects",
    "--prompts in.txt --output no/y": "--output=no/y must lie in a folder that exists; make no first",
    "--prompts in.txt --output in.txt": "--output=in.txt must be a file other than --prompts; "
    "for example --output out.jsonl",
    "--prompts in.txt --output .": "--output=. must be a file other than --prompts; for example --output out.jsonl",
    "--prompts in.txt --output in.txt/y": "--output=in.txt/y must lie in a folder, which HERE/in.txt is not; "
    "give another file",
    "--prompts in.txt --output in.txt/x/y": "--output=in.txt/x/y must lie in a folder, which HERE/in.txt is not; "
    "give another file",
    f"--prompts in.txt --output {'y' * 300}": f"--prompts=in.txt and --output={'y' * 300} must lie where files can be "
    "looked at (File name too long); give other ones",
    "--prompt caf\udce9": "--prompt='caf\\udce9' must be text in UTF-8, in which the byte 0xe9 does not fit; "
    + CONVERT,
    "--stop \udcff": "--stop='\\udcff' must be text in UTF-8, in which the byte 0xff does not fit; " + CONVERT,
}


@pytest.mark.parametrize("options", WRONG)
def test_what_is_typed_wrong_is_refused_in_one_line_before_anything_is_loaded(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("a\n")
    assert main(["generate", "no_run", *options.split()]) == EXIT_USAGE
    assert capsys.readouterr().err == f"error: {WRONG[options]}\n".replace("HERE", str(tmp_path))


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("option", ["--prompt=-", "--interactive"])
def test_standard_input_that_is_not_utf8_is_refused_in_one_line(
    option: str,
    errors: str,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed = io.TextIOWrapper(io.BytesIO("café\n".encode("latin-1")), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", typed)
    with mock.patch("torch.distributed.init_process_group", side_effect=AssertionError("a group was started")):
        assert main(["generate", str(run_dir), option]) == EXIT_USAGE
    expected = f"error: {option} must be text in UTF-8, in which the byte 0xe9 does not fit; {CONVERT}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("options", [["--interactive"], ["--prompts", "in.txt", "--output", "out.jsonl"]])
def test_several_processes_are_for_one_prompt(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in build_rank_environment(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    assert main(["generate", "no_run", *options]) == EXIT_USAGE
    expected = f"error: WORLD_SIZE=2 must be 1 with {options[0]}; start prism generate without torchrun\n"
    assert capsys.readouterr().err == expected


def test_help_loads_no_torch() -> None:
    code = "import sys, launcher.generate as g; g.build_parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ)).returncode == 0
