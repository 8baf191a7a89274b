"""`prism checkpoint` lists, verifies, prunes and converts what lies on the disk."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launcher.__main__ import EXIT_FAILED, EXIT_USAGE, main
from launcher.checkpoint import find_rules
from prism_lm.checkpoint.folder import partial_folder, publish, remove_folder, step_folder
from prism_lm.checkpoint.fragments import KINDS, Piece, build_index
from prism_lm.checkpoint.ownership import claim
from prism_lm.checkpoint.share import MainShare, Share
from tests.launcher.run_folders import CONFIG, flip_byte, write_checkpoint, write_owner

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with complete checkpoints at five steps."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    for step in (50, 100, 150, 200, 250):
        write_checkpoint(tmp_path, step)
    return tmp_path


def list_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").iterdir())


def read_all(run_dir: Path) -> dict[Path, bytes]:
    """Every file of every checkpoint."""
    return {path: path.read_bytes() for path in (run_dir / "checkpoints").rglob("*") if path.is_file()}


def test_listing_shows_states_and_the_rule_that_keeps_each(run_dir: Path, capsys: Capture) -> None:
    (run_dir / "checkpoints/step_150/manifest.json").unlink()
    (run_dir / "checkpoints/step_250/ranks/rank_0.pt").unlink()
    (run_dir / "checkpoints/.partial_step_300").mkdir()
    assert main(["checkpoint", "ls", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "state", "size", "age", "processes", "ZeRO", "kept", "by"]
    assert lines[1].split()[:4] == ["50", "complete", "2.4", "KiB"] and lines[1].endswith("2 (1 x 2)  1     nothing")
    assert lines[2].endswith("last 2, every 100") and lines[3].startswith("150") and "incomplete" in lines[3]
    assert "damaged: ranks/rank_0.pt must be the 10 bytes that manifest.json names, not no file" in lines[5]
    assert lines[6].startswith(".partial_step_300") and lines[6].endswith("-")


def test_rules_are_those_of_the_runs_configuration_or_the_newest_alone(run_dir: Path) -> None:
    assert find_rules(run_dir, [50, 100, 150, 200]) == {
        50: "nothing",
        100: "every 100",
        150: "last 2",
        200: "last 2, every 100",
    }
    (run_dir / "config.yaml").unlink()
    assert find_rules(run_dir, [50, 100]) == {50: "nothing", 100: "last 1"}


def test_listing_of_a_run_without_checkpoints_says_so(tmp_path: Path, capsys: Capture) -> None:
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no checkpoint yet\n"
    assert main(["checkpoint", "ls", str(tmp_path / "absent")]) == EXIT_USAGE


def test_verify_reads_every_byte_of_all_checkpoints_or_of_one(run_dir: Path, capsys: Capture) -> None:
    assert main(["checkpoint", "verify", str(run_dir)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 5 and shown[0].endswith("step_50: 3 files, 2.1 KiB, match their sizes and hashes")
    assert main(["checkpoint", "verify", str(run_dir / "checkpoints/step_150")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_verify_names_each_bad_file_and_fails(run_dir: Path, capsys: Capture) -> None:
    bad = run_dir / "checkpoints"
    flip_byte(bad / "step_50/model.safetensors")
    (bad / "step_50/trainer.json").write_bytes(b"{}")
    (bad / "step_100/ranks/rank_0.pt").unlink()
    (bad / "step_200/manifest.json").write_text("{")
    assert main(["checkpoint", "verify", str(run_dir)]) == EXIT_FAILED
    shown = capsys.readouterr()
    errors = shown.err.splitlines()
    assert errors[0] == f"error: {bad}/step_50/model.safetensors does not match its sha256 in manifest.json"
    assert errors[1].startswith(f"error: {bad}/step_50/trainer.json is 2 bytes, not the ")
    assert errors[2] == f"error: {bad}/step_100/ranks/rank_0.pt is missing"
    assert errors[3].startswith(f"error: {bad}/step_200/manifest.json must hold JSON; ")
    assert errors[4] == f"error: 3 of 5 checkpoints of {run_dir} damaged" and len(errors) == 5
    assert len(shown.out.splitlines()) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.json", "ranks/rank_0.pt"])
def test_verify_finds_one_flipped_byte_in_any_file(run_dir: Path, capsys: Capture, name: str) -> None:
    flip_byte(run_dir / "checkpoints/step_50" / name)
    assert main(["checkpoint", "verify", str(run_dir / "checkpoints/step_50")]) == EXIT_FAILED
    assert f"step_50/{name} does not match" in capsys.readouterr().err


def test_verify_refuses_what_holds_no_complete_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    (write_checkpoint(tmp_path, 50) / "manifest.json").unlink()
    for path in (tmp_path, tmp_path / "checkpoints/step_50", tmp_path / "absent"):
        assert main(["checkpoint", "verify", str(path)]) == EXIT_USAGE
        assert f"RUN|CHECKPOINT={path} must be a run with a complete checkpoint" in capsys.readouterr().err


def prune(run_dir: Path, *options: str) -> int:
    return main(["checkpoint", "prune", str(run_dir), *options])


def test_prune_keeps_what_either_rule_keeps(run_dir: Path, capsys: Capture) -> None:
    assert prune(run_dir, "--keep-last", "1", "--keep-every", "100", "--dry-run") == 0
    assert list_steps(run_dir) == [50, 100, 150, 200, 250]
    assert {path.name for path in run_dir.iterdir()} == {"config.yaml", "checkpoints"}
    shown = capsys.readouterr().out
    assert [line.split()[:2] for line in shown.splitlines()[:2]] == [["would", "remove"]] * 2
    assert "step_50 (2.4 KiB)" in shown and "2 checkpoints would go" in shown
    assert prune(run_dir, "--keep-last", "1", "--keep-every", "100") == 0
    assert list_steps(run_dir) == [100, 200, 250]


def test_prune_never_counts_on_a_newest_checkpoint_that_is_damaged(run_dir: Path, capsys: Capture) -> None:
    flip_byte(run_dir / "checkpoints/step_250/model.safetensors")
    (run_dir / "checkpoints/step_200/manifest.json").unlink()
    kept = {path: content for path, content in read_all(run_dir).items() if path.parts[-2] in ("step_150", "step_250")}
    assert prune(run_dir, "--keep-last", "1", "--keep-every", "0") == 0
    assert list_steps(run_dir) == [150, 200, 250]
    assert "step_250 is left as it is and not counted" in capsys.readouterr().err
    assert kept.items() <= read_all(run_dir).items() and len(kept) == 6


def test_prune_removes_nothing_where_no_checkpoint_is_whole(run_dir: Path, capsys: Capture) -> None:
    for step in list_steps(run_dir):
        flip_byte(run_dir / f"checkpoints/step_{step}/model.safetensors")
    before = read_all(run_dir)
    assert prune(run_dir, "--keep-last", "1", "--keep-every", "0") == EXIT_USAGE
    assert "must hold a complete checkpoint before any is removed" in capsys.readouterr().err
    assert read_all(run_dir) == before


def test_prune_refuses_while_the_run_is_running(run_dir: Path, capsys: Capture) -> None:
    write_owner(run_dir)
    before = read_all(run_dir)
    for options in ([], ["--dry-run"]):
        assert prune(run_dir, "--keep-last", "1", "--keep-every", "0", *options) == EXIT_USAGE
        assert f"RUN={run_dir} must not be running, but is in use by process" in capsys.readouterr().err
    assert read_all(run_dir) == before
    write_owner(run_dir, process_start_time="1")
    assert prune(run_dir, "--keep-last", "1", "--keep-every", "0") == 0
    assert list_steps(run_dir) == [250] and not (run_dir / "owner.json").exists()


def test_prune_holds_the_folder_so_that_no_run_starts_meanwhile(
    run_dir: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(folder: Path) -> None:
        with pytest.raises(ValueError, match="is in use by process"):
            claim(run_dir)
        remove_folder(folder)

    monkeypatch.setattr("launcher.checkpoint.remove_folder", remove)
    assert prune(run_dir, "--keep-last", "4", "--keep-every", "0") == 0
    assert list_steps(run_dir) == [100, 150, 200, 250] and claim(run_dir).token


@pytest.mark.parametrize(("last", "every", "named"), [("0", "0", "--keep-last=0"), ("1", "-1", "--keep-every=-1")])
def test_prune_refuses_numbers_without_a_meaning(
    run_dir: Path, capsys: Capture, last: str, every: str, named: str
) -> None:
    assert prune(run_dir, "--keep-last", last, "--keep-every", every) == EXIT_USAGE
    assert f"error: {named} must be at least" in capsys.readouterr().err
    assert len(list_steps(run_dir)) == 5


def test_help_shows_an_example_of_each_that_parses(capsys: Capture) -> None:
    from launcher.checkpoint import EXAMPLE, build_parser

    lines = [line.split()[2:] for line in EXAMPLE.splitlines()[1:]]
    assert {build_parser().parse_args(words).what for words in lines} == {"ls", "verify", "prune", "convert"}
    with pytest.raises(SystemExit):
        main(["checkpoint", "--help"])
    assert EXAMPLE in capsys.readouterr().out


MASTERS = {"embedding.weight": torch.randn(4, 3, generator=torch.manual_seed(0)), "norm.scale": torch.full((5,), 1 / 3)}
BUFFERS = {"positions": torch.arange(4)}
PIECES = [
    [Piece(name="embedding.weight", start=0, numel=7)],
    [Piece(name="embedding.weight", start=7, numel=5), Piece(name="norm.scale", start=0, numel=5)],
]


def cut(piece: Piece) -> dict[str, torch.Tensor]:
    flat = MASTERS[piece.name].flatten()[piece.start : piece.start + piece.numel]
    return {f"{kind}/{piece.name}": flat.clone() * (kind == "master") for kind in KINDS}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """What two processes write of a model in bf16, its masters cut across a parameter."""
    partial, folder = partial_folder(tmp_path, 30), step_folder(tmp_path, 30)
    for name in ("ranks", "optimizer"):
        (partial / name).mkdir(parents=True)
    shapes = {name: tuple(master.shape) for name, master in MASTERS.items()}
    weights = {name: master.bfloat16() for name, master in MASTERS.items()} | BUFFERS
    main_share = MainShare(weights=weights, index=build_index(shapes, PIECES, 30), trainer={"step": 30}, probe={})
    entries = {}
    for rank, pieces in enumerate(PIECES):
        held = {key: tensor for piece in pieces for key, tensor in cut(piece).items()}
        share = Share(rank=rank, optimizer=held, rank_state={}, main=None if rank else main_share)
        entries |= share.write(partial)
    publish(partial, folder, entries)
    return folder


@pytest.mark.parametrize(("dtype", "kept"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_masters_of_all_processes_become_one_file(
    checkpoint: Path, tmp_path: Path, capsys: Capture, dtype: str, kept: torch.dtype
) -> None:
    out = tmp_path / "new" / "weights"
    assert main(["checkpoint", "convert", str(checkpoint), str(out), "--dtype", dtype]) == 0
    assert capsys.readouterr().out.startswith(f"{out}/model.safetensors: 3 tensors, {dtype}, ")
    written = load_file(out / "model.safetensors")
    expected = {name: master.to(kept) for name, master in MASTERS.items()} | BUFFERS
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert [written[name].dtype for name in MASTERS] == [kept, kept]
    assert main(["checkpoint", "verify", str(out)]) == 0
    assert {path.name for path in out.parent.iterdir()} == {"weights"}


def test_converted_file_is_refused_where_something_lies_already(
    checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "taken").write_text("mine")
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "taken")]) == EXIT_USAGE
    assert f"error: OUT={tmp_path}/taken must not exist" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("name", ["optimizer/rank_1.safetensors", "optimizer/index.json", "model.safetensors"])
def test_damaged_checkpoint_is_not_converted(checkpoint: Path, tmp_path: Path, capsys: Capture, name: str) -> None:
    flip_byte(checkpoint / name)
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]) == EXIT_USAGE
    assert f"must be whole, but {checkpoint / name} does not match its sha256" in capsys.readouterr().err
    (checkpoint / "manifest.json").unlink()
    assert main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "out")]) == EXIT_USAGE
    assert f"CHECKPOINT={checkpoint} must be a complete checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_conversion_that_fails_halfway_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_disk(path: Path, value: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("launcher.checkpoint.write_json", fill_disk)
    with pytest.raises(OSError, match="no space left"):
        main(["checkpoint", "convert", str(checkpoint), str(tmp_path / "new" / "out")])
    assert list((tmp_path / "new").iterdir()) == []
