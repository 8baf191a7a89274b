"""When to save, what to keep, where to resume: the part of a checkpoint that all ranks take part in."""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prism_lm.checkpoint import folder as disk
from prism_lm.checkpoint.fragments import OPTIMIZER_NAME, build_index
from prism_lm.checkpoint.share import MainShare, Share, Staged, Writing

if TYPE_CHECKING:
    from torch import Tensor

    from prism_lm.parallel.mesh import Ranks

_POLL_S = 0.05
# Manifest, index and the file system's own blocks, besides the tensors.
_SPARE_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run saves itself and which checkpoints it keeps. A run always saves after its last step."""

    save_every_steps: int = 1000
    "Steps between checkpoints; 0 saves only at the end or when asked to stop."
    keep_last: int = 2
    "How many of the newest checkpoints to keep, at least 1."
    keep_every_steps: int = 0
    "Checkpoints whose step is a multiple of this are kept for good; 0 keeps none for good."
    asynchronous: bool = False
    """Go on training while a checkpoint is written from a copy in host memory, which must hold one; the next save, and
    the end of the run, wait for it."""

    def __post_init__(self) -> None:
        if self.save_every_steps < 0:
            raise ValueError(
                f"train.checkpoint.save_every_steps={self.save_every_steps} must be at least 0; use 0 for the end only"
            )
        if self.keep_last < 1:
            raise ValueError(f"train.checkpoint.keep_last={self.keep_last} must be at least 1; use 1 to save space")
        if self.keep_every_steps < 0:
            raise ValueError(
                f"train.checkpoint.keep_every_steps={self.keep_every_steps} must be at least 0; use 0 for none"
            )


class Saveable(Protocol):
    """What the manager needs of the engine."""

    def stage(self) -> Staged:
        """A copy of its state in host memory. Called on every rank."""
        ...


def _own_nothing() -> None:
    """Nobody else can take the folder over."""


class CheckpointManager:
    """Saves, keeps and verifies the checkpoints of one run. All ranks see one file system and call together; what one
    of them cannot read or write is raised on all of them, as RunFailed.

    `check_owner` raises where another start has taken the run over; it is asked before anything is published or
    removed.
    """

    def __init__(
        self, run_dir: Path, config: CheckpointConfig, ranks: "Ranks", *, check_owner: Callable[[], None] = _own_nothing
    ) -> None:
        self._run_dir = run_dir
        self._config = config
        self._ranks = ranks
        self._check_owner = check_owner
        self._saved_step: int | None = None
        self._writing: Writing | None = None

    def is_due(self, step: int) -> bool:
        every = self._config.save_every_steps
        return every > 0 and step % every == 0

    def has_saved(self, step: int) -> bool:
        """Whether the checkpoint of that step is published or on its way."""
        return step == self._saved_step or (self._writing is not None and self._writing.step == step)

    def clean(self) -> None:
        """Removes what a killed save left behind. Only before the first save."""
        self._at_main(lambda: disk.remove_incomplete(self._run_dir))

    def verify(self, folder: Path) -> None:
        """Compares every file with its hash, the files shared out over the ranks."""
        from prism_lm.parallel.collectives import call_together

        call_together(lambda: self._verify_share(folder))
        self._saved_step = disk.read_step(folder)

    def _verify_share(self, folder: Path) -> None:
        names = sorted(disk.read_manifest(folder))[self._ranks.rank :: self._ranks.world_size]
        disk.check_hashes(folder, names)

    def save(
        self,
        step: int,
        *,
        engine: Saveable,
        trainer: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        probe: "Mapping[str, Tensor]",
        wait: bool = True,
    ) -> None:
        """Copies the state of `step` to host memory and has it written.

        Returns once it is published and older ones are pruned; with asynchronous saves and wait=False as soon as
        training may go on. One checkpoint is written at a time: the former one is waited for first.
        """
        from prism_lm.parallel.collectives import call_together

        self.finish()
        share = self._build_share(call_together(engine.stage), trainer, rank_state, probe)
        partial = disk.partial_folder(self._run_dir, step)
        needed_bytes = self._sum_bytes(share)
        self._at_main(lambda: self._prepare(partial, needed_bytes))
        self._writing = Writing(share, partial, step=step)
        if wait or not self._config.asynchronous:
            self.finish()

    def describe_progress(self) -> tuple[int, int]:
        """Whether this rank's share is written (0 or 1), and whether writing it failed; both 0 with none under way."""
        if self._writing is None or not self._writing.is_done:
            return 0, 0
        return int(self._writing.error is None), int(self._writing.error is not None)

    def note_agreed(self, finished: int, failed: int) -> None:
        """Given the sums of `describe_progress` over all ranks: publishes what all have written, raises RunFailed on
        all ranks where one failed."""
        if self._writing is None or not (failed or finished == self._ranks.world_size):
            return
        from prism_lm.parallel.collectives import gather_objects, raise_together

        writing, self._writing = self._writing, None
        writing.wait()
        raise_together(writing.error)
        entries = {name: entry for part in gather_objects(writing.entries) for name, entry in part.items()}
        folder = disk.step_folder(self._run_dir, writing.step)
        self._at_main(lambda: self._publish(writing.partial, folder, entries))
        self._saved_step = writing.step

    def finish(self) -> None:
        """Waits until no checkpoint is being written. Every rank calls it together."""
        from prism_lm.parallel.collectives import sum_integers

        while self.is_writing:
            finished, failed = sum_integers(self.describe_progress())
            self.note_agreed(finished, failed)
            time.sleep(_POLL_S if self.is_writing else 0.0)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way to the disk; the same on every rank."""
        return self._writing is not None

    def _build_share(
        self,
        staged: Staged,
        trainer: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        probe: "Mapping[str, Tensor]",
    ) -> Share:
        from prism_lm.parallel.collectives import gather_objects

        index = build_index(staged.shapes, gather_objects(staged.pieces), staged.applied_steps)
        main = MainShare(weights=staged.weights, index=index, trainer=trainer, probe=probe)
        return Share(
            rank=self._ranks.rank,
            optimizer=staged.optimizer,
            rank_state=rank_state,
            main=main if self._ranks.is_main else None,
        )

    def _sum_bytes(self, share: Share) -> int:
        from prism_lm.parallel.collectives import sum_integers

        return sum_integers([share.count_bytes()])[0] + _SPARE_BYTES

    def _prepare(self, partial: Path, needed_bytes: int) -> None:
        self._check_owner()
        if partial.exists():
            disk.remove_folder(partial)
        partial.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(partial.parent).free
        if free_bytes < needed_bytes:
            raise ValueError(
                f"run_dir={self._run_dir} must have {needed_bytes / 2**30:.2f} GiB free for the checkpoint of "
                f"{partial.name.removeprefix(disk.PARTIAL_PREFIX)}, but has {free_bytes / 2**30:.2f}; remove older "
                "ones (prism checkpoint prune) or lower train.checkpoint.keep_last"
            )
        for name in ("ranks", OPTIMIZER_NAME):
            (partial / name).mkdir(parents=True)

    def _publish(self, partial: Path, folder: Path, entries: dict[str, disk.FileEntry]) -> None:
        self._check_owner()
        disk.publish(partial, folder, dict(sorted(entries.items())))
        self._prune()

    def _prune(self) -> None:
        folders = {disk.read_step(folder) or 0: folder for folder in disk.list_published(self._run_dir)}
        keep_last, keep_every = self._config.keep_last, self._config.keep_every_steps
        for step in disk.choose_removals(list(folders), keep_last=keep_last, keep_every_steps=keep_every):
            disk.remove_folder(folders[step])

    def _at_main(self, function: Callable[[], object]) -> None:
        """Calls it at rank 0; its error is raised on all ranks."""
        from prism_lm.parallel.collectives import call_together

        call_together(lambda: function() if self._ranks.is_main else None)
