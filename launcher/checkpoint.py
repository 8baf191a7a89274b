"""`prism checkpoint ls | verify | prune | convert`: a run's checkpoints, looked at, checked, thinned out, turned into
one file of weights.

A checkpoint is complete once its manifest.json, written last, names the size and hash of every file. `ls` compares
sizes, `verify` every byte. `prune` removes what two rules do not keep, never the newest complete checkpoint, and not
while the run is running. `convert` puts the fp32 masters of all processes together, or their bf16 cast, into the
model.safetensors of a new folder; it needs the memory of the whole model once.
"""

import argparse
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import yaml

from launcher.run_folder import (
    SavedCheckpoint,
    align,
    check_folder,
    find_owner,
    list_saved,
    spell_age,
    spell_bytes,
    spell_owner,
)
from prism_lm.checkpoint.folder import (
    MANIFEST_NAME,
    WEIGHTS_NAME,
    FileEntry,
    choose_removals,
    describe_file,
    list_published,
    read_manifest,
    read_step,
    remove_folder,
    write_json,
)
from prism_lm.checkpoint.ownership import claim

EXAMPLE = """\
example:
  prism checkpoint ls runs/tiny
  prism checkpoint verify runs/tiny
  prism checkpoint verify runs/tiny/checkpoints/step_1000
  prism checkpoint prune runs/tiny --keep-last 2 --keep-every 1000 --dry-run
  prism checkpoint convert runs/tiny/checkpoints/step_1000 weights/tiny --dtype bf16
"""
COLUMNS = ["step", "state", "size", "age", "processes", "ZeRO", "kept by"]


def main(arguments: list[str]) -> int:
    """Run one of the four; 1 where `verify` finds a bad file, otherwise 0."""
    parsed = build_parser().parse_args(arguments)
    match parsed.what:
        case "ls":
            return list_checkpoints(Path(parsed.run))
        case "verify":
            return verify(Path(parsed.path))
        case "prune":
            check_keep(parsed.keep_last, parsed.keep_every)
            return prune(Path(parsed.run), parsed.keep_last, parsed.keep_every, is_dry=parsed.dry_run)
        case _:
            return convert(Path(parsed.checkpoint), Path(parsed.out), parsed.dtype)


def build_parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="prism checkpoint", description=__doc__, formatter_class=shape, epilog=EXAMPLE
    )
    verbs = parser.add_subparsers(dest="what", required=True, metavar="ls|verify|prune|convert")
    ls = verbs.add_parser("ls", help="step, state, size, age, processes, ZeRO stage, and the rule that keeps it")
    ls.add_argument("run", metavar="RUN", help="folder of a run")
    checked = verbs.add_parser("verify", help="every file's size and hash; names each bad file, exit code 1")
    checked.add_argument("path", metavar="RUN|CHECKPOINT", help="a run, for all of its checkpoints, or one of them")
    _add_prune(verbs.add_parser("prune", help="remove checkpoints, never the newest complete one"))
    _add_convert(verbs.add_parser("convert", help="one model.safetensors from the files of all processes"))
    return parser


def _add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run that is not running")
    parser.add_argument("--keep-last", type=int, required=True, metavar="K", help="keep the K newest, at least 1")
    parser.add_argument(
        "--keep-every", type=int, required=True, metavar="N", help="keep steps that are multiples of N; 0 for none"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, remove nothing")


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder checkpoints/step_<n> of a run")
    parser.add_argument("out", metavar="OUT", help="folder to make; it must not exist")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="fp32: the masters; bf16: their cast (default: fp32)"
    )


def list_checkpoints(run_dir: Path) -> int:
    """Print a table of the run's checkpoints, incomplete and damaged ones included."""
    check_folder(run_dir)
    saved = list_saved(run_dir)
    if not saved:
        print(f"{run_dir}: no checkpoint yet")
        return 0
    rules = find_rules(run_dir, [one.step for one in saved if one.step is not None and one.problem is None])
    print("\n".join(align([COLUMNS, *(_describe(one, rules) for one in saved)])))
    return 0


def _describe(saved: SavedCheckpoint, rules: dict[int, str]) -> list[str]:
    trainer, step = saved.trainer, saved.step
    kept_by = "-" if step is None or saved.problem else rules[step]
    return [
        saved.folder.name if step is None else str(step),
        saved.problem or "complete",
        spell_bytes(saved.bytes),
        spell_age(saved.age_s),
        _spell_processes(trainer),
        str(trainer.get("train.zero_stage", "-")),
        kept_by,
    ]


def _spell_processes(trainer: dict[str, Any]) -> str:
    """4 (2 x 2): data x sequence degree."""
    if "world_size" not in trainer:
        return "-"
    world_size, degree = int(trainer["world_size"]), int(trainer.get("parallel.sequence_degree", 1))
    return f"{world_size} ({world_size // degree} x {degree})"


def find_rules(run_dir: Path, steps: list[int]) -> dict[int, str]:
    """For each complete checkpoint's step the rules of the run's config.yaml that keep it; `nothing` for one that the
    next save removes."""
    keep_last, keep_every = _read_rules(run_dir)
    newest = sorted(steps)[-keep_last:]
    rules: dict[int, str] = {}
    for step in steps:
        kept = [f"last {keep_last}"] if step in newest else []
        kept += [f"every {keep_every}"] if keep_every and step % keep_every == 0 else []
        rules[step] = ", ".join(kept) or "nothing"
    return rules


def _read_rules(run_dir: Path) -> tuple[int, int]:
    """keep_last and keep_every_steps of the run's configuration; 1 and 0, what every prune keeps, where unknown."""
    try:
        held: Any = yaml.safe_load((run_dir / "config.yaml").read_text())["train"]["checkpoint"]
        return max(1, int(held["keep_last"])), int(held["keep_every_steps"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return 1, 0


def verify(path: Path) -> int:
    """Compare every file of one checkpoint, or of all of a run's, with its size and hash. 1 where one is bad.

    Raises ValueError where there is no checkpoint to look at.
    """
    folders = find_published(path)
    bad_checkpoints = 0
    for folder in folders:
        found = list(find_bad_files(folder))
        bad_checkpoints += bool(found)
        for words in found:
            print(f"error: {words}", file=sys.stderr)
        if not found:
            files = read_manifest(folder)
            total = sum(entry["bytes"] for entry in files.values())
            print(f"{folder}: {len(files)} files, {spell_bytes(total)}, match their sizes and hashes", flush=True)
    if bad_checkpoints:
        print(f"error: {bad_checkpoints} of {len(folders)} checkpoints of {path} damaged", file=sys.stderr)
    return 1 if bad_checkpoints else 0


def find_published(path: Path) -> list[Path]:
    """The path itself where it is a checkpoint with a manifest, otherwise those of the run. Raises ValueError where
    there is none."""
    if (path / MANIFEST_NAME).is_file():
        return [path]
    folders = list_published(path) if path.is_dir() else []
    if not folders:
        raise ValueError(
            f"RUN|CHECKPOINT={path} must be a run with a complete checkpoint, or a folder that holds {MANIFEST_NAME}; "
            "`prism checkpoint ls RUN` lists them"
        )
    return folders


def find_bad_files(folder: Path) -> Iterator[str]:
    """What is wrong with each file of a checkpoint that is not what the manifest says."""
    try:
        entries = read_manifest(folder)
    except (ValueError, OSError) as error:
        yield str(error)
        return
    for name, entry in sorted(entries.items()):
        try:
            problem = _compare(folder / name, entry)
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        if problem is not None:
            yield f"{folder / name} {problem}"


def _compare(path: Path, entry: FileEntry) -> str | None:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"is {size} bytes, not the {entry['bytes']} that {MANIFEST_NAME} names"
    if describe_file(path)["sha256"] != entry["sha256"]:
        return f"does not match its sha256 in {MANIFEST_NAME}"
    return None


def check_keep(keep_last: int, keep_every: int) -> None:
    """Raises ValueError for numbers that would keep no checkpoint or have no meaning."""
    if keep_last < 1:
        raise ValueError(f"--keep-last={keep_last} must be at least 1; use 1 to keep the newest alone")
    if keep_every < 0:
        raise ValueError(f"--keep-every={keep_every} must be at least 0; use 0 to keep none for its step")


def prune(run_dir: Path, keep_last: int, keep_every: int, *, is_dry: bool) -> int:
    """Remove the checkpoints that neither rule keeps. Raises ValueError while the run is running, and where no
    checkpoint is whole.

    What is incomplete or damaged is neither counted nor removed. The newest that is kept is read and hashed before
    anything goes. No run can start in the folder meanwhile.
    """
    check_folder(run_dir)
    check_not_running(run_dir)
    with nullcontext() if is_dry else _claimed(run_dir):
        removals = choose_folders(run_dir, keep_last, keep_every)
        for folder in removals:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            print(f"{'would remove' if is_dry else 'removing'} {folder} ({spell_bytes(size)})", flush=True)
            if not is_dry:
                remove_folder(folder)
    print(f"{run_dir}: {len(removals)} checkpoints {'would go' if is_dry else 'removed'}")
    return 0


@contextmanager
def _claimed(run_dir: Path) -> Generator[None, None, None]:
    owner = claim(run_dir)
    try:
        yield
    finally:
        owner.release()


def check_not_running(run_dir: Path) -> None:
    """Raises ValueError naming the process that runs the folder."""
    if owner := find_owner(run_dir):
        raise ValueError(
            f"RUN={run_dir} must not be running, but is in use by {spell_owner(owner)}; stop it first, or leave it to "
            "train.checkpoint.keep_last and keep_every_steps of the run"
        )


def choose_folders(run_dir: Path, keep_last: int, keep_every: int) -> list[Path]:
    """The folders to remove, oldest first. Raises ValueError where no checkpoint is whole, byte for byte."""
    sound = [saved.folder for saved in list_saved(run_dir) if saved.problem is None]
    while sound and (bad := next(find_bad_files(sound[-1]), None)):
        print(f"error: {bad}; {sound[-1].name} is left as it is and not counted", file=sys.stderr)
        sound.pop()
    if not sound:
        raise ValueError(f"RUN={run_dir} must hold a complete checkpoint before any is removed; there is none")
    steps = {read_step(folder) or 0: folder for folder in sound}
    return [steps[step] for step in choose_removals(list(steps), keep_last=keep_last, keep_every_steps=keep_every)]


def convert(checkpoint: Path, out: Path, dtype: Literal["fp32", "bf16"]) -> int:
    """Make the folder `out` with model.safetensors: every parameter whole, and the persistent buffers as they are.

    It appears whole or not at all, with a manifest that `verify` reads. Raises ValueError where `out` exists, and where
    the checkpoint is none or not what its manifest says.
    """
    check_convertible(checkpoint, out)
    partial = out.with_name(f".{out.name}.partial")
    if partial.exists():
        remove_folder(partial)
    partial.mkdir(parents=True)
    try:
        count = write_weights(checkpoint, partial / WEIGHTS_NAME, dtype)
        entry = describe_file(partial / WEIGHTS_NAME)
        write_json(partial / MANIFEST_NAME, {"files": {WEIGHTS_NAME: entry}})
        partial.rename(out)
    except BaseException:
        remove_folder(partial)
        raise
    print(f"{out / WEIGHTS_NAME}: {count} tensors, {dtype}, {spell_bytes(entry['bytes'])}")
    return 0


def check_convertible(checkpoint: Path, out: Path) -> None:
    """Raises ValueError where there is no sound checkpoint to read or no free name to write to."""
    if out.exists() or out.is_symlink():
        raise ValueError(f"OUT={out} must not exist, so that nothing is overwritten; name a new folder")
    if not (checkpoint / MANIFEST_NAME).is_file():
        raise ValueError(
            f"CHECKPOINT={checkpoint} must be a complete checkpoint, a folder that holds {MANIFEST_NAME}; "
            "`prism checkpoint ls RUN` lists them"
        )
    if bad := next(find_bad_files(checkpoint), None):
        raise ValueError(f"CHECKPOINT={checkpoint} must be whole, but {bad}; convert another one")


def write_weights(checkpoint: Path, path: Path, dtype: Literal["fp32", "bf16"]) -> int:
    """Write the file; returns how many tensors it holds."""
    import torch
    from safetensors.torch import load_file, save_file

    from prism_lm.checkpoint.fragments import FragmentReader

    tensors = load_file(checkpoint / WEIGHTS_NAME)
    target = torch.float32 if dtype == "fp32" else torch.bfloat16
    with FragmentReader(checkpoint) as reader:
        for name in reader.index.shapes:
            tensors[name] = reader.read_full(name, "master").to(target).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves the file to its owner alone
    return len(tensors)
