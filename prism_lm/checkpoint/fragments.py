"""Optimizer state on disk: each rank's contiguous pieces of every parameter's fp32 master and moments.

`optimizer/rank_<r>.safetensors` holds `<kind>/<parameter>`, flat fp32 pieces of the flattened parameter;
`optimizer/index.json` says which rank holds which elements, and how many updates the optimizer has applied. Together
they are whole parameters, whatever number of ranks and ZeRO stage wrote them, and any others read their own pieces.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from prism_lm.checkpoint.folder import describe_remedy, read_json

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["master", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = get_args(Kind)
OPTIMIZER_NAME = "optimizer"
INDEX_NAME = "index.json"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements start to start + numel of a flattened parameter."""

    name: str
    start: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class Index:
    """What optimizer/index.json says."""

    applied_steps: int
    "Updates that the optimizer has applied, which its bias correction counts."
    shapes: Mapping[str, tuple[int, ...]]
    "Of every parameter that is trained, by name; a shared one once."
    pieces: Mapping[str, tuple[tuple[int, int, int], ...]]
    "Of every parameter: (rank, start, numel), by start; they cover it without overlap."

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def rank_path(folder: Path, rank: int) -> Path:
    """One rank's pieces."""
    return folder / OPTIMIZER_NAME / f"rank_{rank}.safetensors"


def build_index(
    shapes: Mapping[str, tuple[int, ...]], pieces_by_rank: Iterable[Iterable[Piece]], applied_steps: int
) -> Index:
    """The index of what all ranks hold. Raises ValueError where they do not hold every element once."""
    found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in shapes}
    for rank, pieces in enumerate(pieces_by_rank):
        for piece in pieces:
            found[piece.name].append((rank, piece.start, piece.numel))
    ordered = {name: tuple(sorted(pieces, key=lambda piece: piece[1])) for name, pieces in found.items()}
    for name, pieces in ordered.items():
        _check_covered(name, shapes[name], pieces)
    return Index(applied_steps=applied_steps, shapes=dict(shapes), pieces=ordered)


def _check_covered(name: str, shape: tuple[int, ...], pieces: tuple[tuple[int, int, int], ...]) -> None:
    covered = 0
    for _, start, numel in pieces:
        if start != covered:
            break
        covered = start + numel
    numel = _count(shape)
    if covered != numel:
        raise ValueError(f"the ranks must hold all {numel} elements of {name} once, but hold {covered} in order")


def _count(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def read_index(folder: Path) -> Index:
    """Raises ValueError naming the file and the remedy where it is damaged."""
    path, remedy = folder / OPTIMIZER_NAME / INDEX_NAME, describe_remedy(folder)
    if not path.is_file():
        raise ValueError(f"{path} must exist to resume; {remedy}")
    content = cast(dict[str, Any], read_json(path, remedy=remedy))
    try:
        shapes = {name: tuple(int(size) for size in shape) for name, shape in content["shapes"].items()}
        pieces = {name: tuple((int(r), int(s), int(n)) for r, s, n in of) for name, of in content["pieces"].items()}
        return Index(applied_steps=int(content["applied_steps"]), shapes=shapes, pieces=pieces)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} must list the optimizer's pieces; {remedy}") from error


class FragmentReader(AbstractContextManager["FragmentReader"]):
    """Any range of any parameter's state, from whichever rank files hold it; only those elements are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_index(folder)
        self._stack = ExitStack()
        self._files: dict[int, Any] = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._files = {}

    def read(self, name: str, kind: Kind, start: int, numel: int) -> "Tensor":
        """Elements start to start + numel of the flattened parameter, fp32, on the CPU.

        Raises ValueError for a parameter or a range that the checkpoint does not hold.
        """
        import torch

        end = start + numel
        held = self.index.pieces.get(name)
        if held is None or not 0 <= start <= end <= _count(self.index.shapes[name]):
            raise ValueError(
                f"{self.folder / OPTIMIZER_NAME} must hold elements {start} to {end} of {name}; resume with the "
                "run's own model"
            )
        parts = [
            self._open(rank).get_slice(f"{kind}/{name}")[max(start, first) - first : min(end, first + count) - first]
            for rank, first, count in held
            if first < end and start < first + count
        ]
        return torch.cat(parts) if parts else torch.zeros(0)

    def read_full(self, name: str, kind: Kind) -> "Tensor":
        """The whole parameter's state in its shape."""
        shape = self.index.shapes.get(name, ())
        return self.read(name, kind, 0, _count(shape)).view(shape)

    def _open(self, rank: int) -> Any:
        from safetensors import safe_open

        if rank not in self._files:
            self._files[rank] = self._stack.enter_context(safe_open(rank_path(self.folder, rank), framework="pt"))
        return self._files[rank]


def list_parameters(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every parameter whose optimizer state the checkpoint holds."""
    return dict(read_index(folder).shapes)


def read_full(folder: Path, name: str, kind: Kind) -> "Tensor":
    """One parameter's whole fp32 state, in its shape."""
    with FragmentReader(folder) as reader:
        return reader.read_full(name, kind)
