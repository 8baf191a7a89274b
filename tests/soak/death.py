"""Real SIGKILLs of the own process, from wrappers that a child puts around what it calls."""

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.soak.plan import ACCUMULATION, Kill

VALIDATION_TOKEN = 63
"First token of every slice of the validation rows, and of no other."
_STEP_NAME = re.compile(r"step_\d+")


def note_pid(attempt_dir: Path, rank: int) -> None:
    """Tells the ranks of this start which process this one is."""
    (attempt_dir / f"pid_{rank}.tmp").write_text(str(os.getpid()))
    (attempt_dir / f"pid_{rank}.tmp").rename(attempt_dir / f"pid_{rank}")


class Death:
    """Waits for a moment and kills: this process, before it all the others of its start where all are to die."""

    def __init__(self, kill: Kill, attempt_dir: Path) -> None:
        self.kill = kill
        self.attempt_dir = attempt_dir
        self.seen = 0
        self.forwards = 0
        self.held: set[Path] = set()
        self.is_writing = threading.Event()
        self.phase = ""

    def come_to(self, place: str, before: Callable[[], Any] = lambda: None) -> None:
        """Dies at the right visit of the kill's place, after a last act."""
        if place != self.kill.place:
            return
        self.seen += 1
        if self.seen == self.kill.occurrence:
            before()
            self.strike()

    def strike(self) -> None:
        """Does not return."""
        own = os.getpid()
        if self.kill.who is None:
            siblings = {int(path.read_text()) for path in self.attempt_dir.glob("pid_*[0-9]")} - {own}
            for pid in siblings:
                kill_if_there(pid)
        os.kill(own, signal.SIGKILL)
        signal.pause()

    def strike_after(self, delay_s: float) -> None:
        """Strikes from a thread."""
        timer = threading.Timer(delay_s, self.strike)
        timer.daemon = True
        timer.start()

    def watch_model(self, model: nn.Module) -> None:
        """Moments in the forwards of training and of evaluation. A probe's forward is neither."""
        blocks: Any = model.get_submodule("blocks")
        model.register_forward_pre_hook(self.begin_forward, with_kwargs=True)
        blocks[-1].register_forward_pre_hook(lambda module, inputs: self.reach_last_block())

    def begin_forward(self, model: nn.Module, inputs: Any, batch: dict[str, Tensor]) -> None:
        tokens = batch["input_ids_BT"] if batch else inputs[0]
        if not model.training:
            self.phase = "evaluation" if int(tokens[0, 0]) == VALIDATION_TOKEN else "probe"
            return
        self.phase = "forward"
        self.forwards += 1
        if self.kill.point == "between_micro_batches" and self.forwards % ACCUMULATION == 0:
            self.come_to("second")

    def reach_last_block(self) -> None:
        if self.phase == self.kill.point:
            self.come_to("last_block")
        if self.phase == "forward":
            if self.kill.point == "after_resume":
                self.come_to("first_forward")
            if self.is_writing.is_set():
                self.strike()

    def watch_disk(self, patch: pytest.MonkeyPatch) -> None:
        """Moments in a save, in pruning and in cleaning up, told apart by what is synced and removed."""
        fsync, rmtree = os.fsync, shutil.rmtree

        def sync(descriptor: int) -> None:
            self.before_sync(Path(f"/proc/self/fd/{descriptor}").readlink())
            fsync(descriptor)

        def remove(path: Any, *arguments: Any, **settings: Any) -> None:
            self.before_removal(Path(path))
            rmtree(path, *arguments, **settings)

        patch.setattr(os, "fsync", sync)
        patch.setattr(shutil, "rmtree", remove)

    def before_sync(self, path: Path) -> None:
        if "_save" not in self.kill.point or "checkpoints" not in path.parts:
            return
        place = find_place(path)
        if self.kill.place == "in_flight" and place == "file":
            self.hold_writer(path)
        elif place is not None:
            self.come_to(place, lambda: tear(path) if path.is_file() else None)

    def hold_writer(self, path: Path) -> None:
        """Keeps the background writer of the kill's save waiting until the training that goes on has struck."""
        folder = next(parent for parent in path.parents if parent.name.startswith(".partial_"))
        if threading.current_thread() is threading.main_thread() or folder in self.held:
            return
        self.held.add(folder)
        if len(self.held) == self.kill.occurrence:
            self.is_writing.set()
            threading.Event().wait(10.0)

    def before_removal(self, folder: Path) -> None:
        if self.kill.place == "cleaning" and folder.name.startswith(".partial_"):
            self.come_to("cleaning", lambda: remove_half(folder))
        elif self.kill.point == "prune" and _STEP_NAME.fullmatch(folder.name):
            self.come_to("marker")
            self.come_to("half", lambda: remove_half(folder))


def kill_if_there(pid: int) -> None:
    """A sibling that has ended by itself is none the worse."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def find_place(path: Path) -> str | None:
    """Which moment of a save the sync of a file or folder below `checkpoints` is; None for no moment of its own."""
    partial = next((part for part in path.parts if part.startswith(".partial_")), None)
    if partial is not None:
        # A writer's thread syncs folders too, after a file; the main thread does before it renames.
        is_written = path.name == partial and threading.current_thread() is threading.main_thread()
        return "file" if path.is_file() else "before_rename" if is_written else None
    if path.name == "checkpoints":
        return "after_rename"
    if path.is_file():
        return "manifest" if "manifest" in path.name else None
    return "published" if _STEP_NAME.fullmatch(path.name) and (path / "manifest.json").exists() else None


def tear(path: Path) -> None:
    """Leaves the first half of a file, as a death in the middle of writing it does."""
    os.truncate(path, path.stat().st_size // 2)


def remove_half(folder: Path) -> None:
    """Removes every other file, as a death in the middle of removing the folder does."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file())[::2]:
        path.unlink()
