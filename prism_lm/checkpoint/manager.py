"""When to save, what to keep, where to resume: the part of a checkpoint that all ranks take part in."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prism_lm.checkpoint import folder as disk

if TYPE_CHECKING:
    from prism_lm.parallel.mesh import Ranks


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run saves itself and which checkpoints it keeps. A run always saves after its last step."""

    save_every_steps: int = 1000
    "Steps between checkpoints; 0 saves only at the end or when asked to stop."
    keep_last: int = 2
    "How many of the newest checkpoints to keep, at least 1."
    keep_every_steps: int = 0
    "Checkpoints whose step is a multiple of this are kept for good; 0 keeps none for good."

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
    """What the manager needs of the engine; both are called on every rank."""

    def save(self, folder: Path) -> None:
        """Writes what a resume needs below `folder`/deepspeed."""
        ...

    def save_weights(self, path: Path) -> None:
        """Writes the whole model's weights as one safetensors file, at rank 0."""
        ...


class CheckpointManager:
    """Saves, keeps and verifies the checkpoints of one run. All ranks see one file system and call together; what one
    of them cannot read or write is raised on all of them, as RunFailed."""

    def __init__(self, run_dir: Path, config: CheckpointConfig, ranks: "Ranks") -> None:
        self._run_dir = run_dir
        self._config = config
        self._ranks = ranks
        self._saved_step: int | None = None

    def is_due(self, step: int) -> bool:
        every = self._config.save_every_steps
        return every > 0 and step % every == 0

    def clean(self) -> None:
        """Removes what a killed save left behind. Only before the first save."""
        from prism_lm.parallel.collectives import call_together

        call_together(lambda: disk.remove_incomplete(self._run_dir) if self._ranks.is_main else None)

    def verify(self, folder: Path) -> None:
        """Compares every file with its hash, the files shared out over the ranks."""
        from prism_lm.parallel.collectives import call_together

        call_together(lambda: self._verify_share(folder))
        self._saved_step = disk.read_step(folder)

    def _verify_share(self, folder: Path) -> None:
        damaged = disk.find_damaged(folder, self._take_share(sorted(disk.read_manifest(folder))))
        if damaged is not None:
            rule = f"must match its hash in {disk.MANIFEST_NAME}"
            raise ValueError(f"{folder / damaged} {rule}; {disk.describe_remedy(folder)}")

    def _take_share(self, names: list[str]) -> list[str]:
        return names[self._ranks.rank :: self._ranks.world_size]

    def save(self, step: int, *, engine: Saveable, trainer: dict[str, Any], rank_state: dict[str, Any]) -> None:
        """Writes and publishes the checkpoint of `step`, then prunes; does nothing when that step is saved already."""
        from prism_lm.parallel.collectives import call_together

        if step == self._saved_step:
            return
        partial = disk.partial_folder(self._run_dir, step)
        call_together(lambda: self._prepare(partial))
        call_together(lambda: engine.save(partial))
        call_together(lambda: engine.save_weights(partial / disk.WEIGHTS_NAME))
        call_together(lambda: self._write_states(partial, trainer, rank_state))
        self._publish(partial, disk.step_folder(self._run_dir, step))
        self._saved_step = step

    def _prepare(self, partial: Path) -> None:
        if self._ranks.is_main:
            if partial.exists():
                disk.remove_folder(partial)
            (partial / "ranks").mkdir(parents=True)

    def _write_states(self, partial: Path, trainer: dict[str, Any], rank_state: dict[str, Any]) -> None:
        import torch

        torch.save(rank_state, disk.rank_file(partial, self._ranks.rank))
        if self._ranks.is_main:
            disk.write_json(partial / disk.TRAINER_NAME, trainer)

    def _publish(self, partial: Path, folder: Path) -> None:
        """Every rank syncs and hashes its share of the files; rank 0 publishes and prunes."""
        from prism_lm.parallel.collectives import call_together, gather_objects

        share = self._take_share(self._agree_on_files(partial))
        described = call_together(lambda: {name: disk.describe_file(partial / name) for name in share})
        entries = {name: entry for part in gather_objects(described) for name, entry in part.items()}
        call_together(lambda: self._finish(partial, folder, entries) if self._ranks.is_main else None)

    def _agree_on_files(self, partial: Path) -> list[str]:
        """Every file that any rank sees. A rank sees what it wrote, but its view of the others may be an old one."""
        from prism_lm.parallel.collectives import broadcast_object, call_together, gather_objects

        seen = call_together(lambda: disk.list_files(partial))
        seen_by_main = broadcast_object(seen)
        return sorted({*seen_by_main}.union(*gather_objects(sorted({*seen} - {*seen_by_main}))))

    def _finish(self, partial: Path, folder: Path, entries: dict[str, disk.FileEntry]) -> None:
        disk.publish(partial, folder, dict(sorted(entries.items())))
        self._prune()

    def _prune(self) -> None:
        folders = {disk.read_step(folder) or 0: folder for folder in disk.list_published(self._run_dir)}
        keep_last, keep_every = self._config.keep_last, self._config.keep_every_steps
        for step in disk.choose_removals(list(folders), keep_last=keep_last, keep_every_steps=keep_every):
            disk.remove_folder(folders[step])
