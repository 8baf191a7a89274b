"""What each rank writes of a checkpoint: held in host memory first, then written without a word to other ranks."""

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism_lm.checkpoint import folder as disk
from prism_lm.checkpoint.fragments import INDEX_NAME, OPTIMIZER_NAME, Index, Piece, rank_path

if TYPE_CHECKING:
    from torch import Tensor

PROBE_NAME = "probe.safetensors"


@dataclass(frozen=True, kw_only=True)
class Staged:
    """An engine's state in host memory, which training no longer changes."""

    optimizer: "Mapping[str, Tensor]"
    "This rank's pieces of masters and moments, flat fp32, by `<kind>/<parameter>`."
    pieces: list[Piece]
    "Where they belong."
    shapes: Mapping[str, tuple[int, ...]]
    "Of every trained parameter, on every rank alike."
    applied_steps: int
    "Updates that the optimizer has applied."
    weights: "Mapping[str, Tensor]"
    "Whole weights and buffers at rank 0; empty elsewhere."


@dataclass(frozen=True, kw_only=True)
class MainShare:
    """What rank 0 writes besides its own pieces."""

    weights: "Mapping[str, Tensor]"
    index: Index
    trainer: Mapping[str, Any]
    probe: "Mapping[str, Tensor]"
    "Empty where nothing was probed."


@dataclass(frozen=True, kw_only=True)
class Share:
    """All that one rank writes."""

    rank: int
    optimizer: "Mapping[str, Tensor]"
    rank_state: Mapping[str, Any]
    "This rank's generators."
    main: MainShare | None = None

    def count_bytes(self) -> int:
        """Bytes of its tensors, which is nearly all of it."""
        held = [self.optimizer, self.main.weights, self.main.probe] if self.main else [self.optimizer]
        return sum(tensor.numel() * tensor.element_size() for tensors in held for tensor in tensors.values())

    def write(self, partial: Path) -> dict[str, disk.FileEntry]:
        """Writes its files below `partial` and forces them to the disk; returns what the manifest says of them."""
        import torch
        from safetensors.torch import save_file

        names = [rank_path(partial, self.rank), disk.rank_file(partial, self.rank)]
        with naming(names[0]):
            save_file(dict(self.optimizer), names[0])
        with naming(names[1]):
            torch.save(dict(self.rank_state), names[1])
        if self.main is not None:
            names += _write_main(self.main, partial)
        for path in names:
            path.chmod(0o644)  # safetensors leaves a file to its owner alone
        return {path.relative_to(partial).as_posix(): disk.describe_file(path) for path in names}


def _write_main(main: MainShare, partial: Path) -> list[Path]:
    from safetensors.torch import save_file

    weights, index, trainer = (
        partial / disk.WEIGHTS_NAME,
        partial / OPTIMIZER_NAME / INDEX_NAME,
        partial / disk.TRAINER_NAME,
    )
    with naming(weights):
        save_file(dict(main.weights), weights)
    with naming(index):
        disk.write_json(index, main.index.describe())
    with naming(trainer):
        disk.write_json(trainer, dict(main.trainer))
    if not main.probe:
        return [weights, index, trainer]
    with naming(partial / PROBE_NAME):
        save_file(dict(main.probe), partial / PROBE_NAME)
    return [weights, index, trainer, partial / PROBE_NAME]


@contextmanager
def naming(path: Path) -> Generator[None, None, None]:
    """An error in the block that does not name the file, as those of safetensors, torch and a full disk do not, is
    raised as OSError that does."""
    try:
        yield
    except Exception as error:
        if path.name in str(error):
            raise
        raise OSError(f"{path} cannot be written ({error}); free or replace the disk") from error


class Writing:
    """One rank's share on its way to the disk, in a thread of its own."""

    def __init__(self, share: Share, partial: Path, *, step: int) -> None:
        self.partial, self.step = partial, step
        self.entries: dict[str, disk.FileEntry] = {}
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(share,), name=f"checkpoint of step {step}")
        self._thread.start()

    def _run(self, share: Share) -> None:
        try:
            self.entries = share.write(self.partial)
        except Exception as error:
            self.error = error

    @property
    def is_done(self) -> bool:
        """Written, or failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is done."""
        self._thread.join()
