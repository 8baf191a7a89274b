"""A proof that the model in memory after a load is the one that was saved: its logits on one stored row.

The row is made of the first tokens of the slices that data rank 0's processes hold, and both the row and the logits are
whole, so that any number of processes and any sequence degree can compute them again.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from prism_lm.checkpoint.folder import WEIGHTS_NAME
from prism_lm.checkpoint.share import PROBE_NAME
from prism_lm.parallel.collectives import RunFailed, broadcast_object, sum_tensor
from prism_lm.parallel.mesh import Ranks
from prism_lm.train.engine import Engine
from prism_lm.train.step import TrainBatch

MAX_SLICE_TOKENS = 256
NUM_POSITIONS = 8
# Of the largest logit, for the same processes on the same hardware, and for others, whose sums have other orders.
SAME_BOUNDS = {"fp32": 2.0**-18, "bf16": 2.0**-8}
OTHER_BOUNDS = {"fp32": 2.0**-12, "bf16": 2.0**-4}


def cut_row(batch: TrainBatch) -> dict[str, Tensor]:
    """This process's part of a probe row: the first tokens of the batch's first row, (1, at most MAX_SLICE_TOKENS)."""
    num_tokens = min(MAX_SLICE_TOKENS, batch["input_ids_BT"].shape[1])
    return {
        "input_ids_BT": batch["input_ids_BT"][:1, :num_tokens].clone(),
        "document_start_BT": batch["document_start_BT"][:1, :num_tokens].clone(),
    }


def take_probe(engine: Engine, row: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The whole row, tokens and document starts (1, P), and `logits` fp32 (NUM_POSITIONS, V) of tokens spread over it.

    On the CPU, the same on every rank. Every rank calls it, with its part of the row.
    """
    whole = {name: _join(part, ranks, engine.device) for name, part in row.items()}
    return {**whole, "logits": _compute_logits(engine, whole, ranks)}


def check_probe(engine: Engine, folder: Path, ranks: Ranks, *, precision: str, is_same: bool) -> None:
    """Computes a checkpoint's logits again; a checkpoint without a probe, of step 0, is taken as it is.

    Raises RunFailed on every rank where they differ by more than rounding (`is_same`: saved by as many processes in the
    same arrangement), naming the groups of parameters that are not those of the file. Every rank calls it.
    """
    if not (folder / PROBE_NAME).is_file():
        return
    stored = load_file(folder / PROBE_NAME)
    expected = stored.pop("logits")
    num_tokens = stored["input_ids_BT"].shape[1] // ranks.sequence_degree * ranks.sequence_degree
    num_checked = sum(position < num_tokens for position in _choose_positions(stored["input_ids_BT"].shape[1]))
    actual = _compute_logits(engine, stored, ranks)
    error = float((actual - expected)[:num_checked].abs().max() / expected.abs().max())
    bound = (SAME_BOUNDS if is_same else OTHER_BOUNDS)[precision]
    if not error <= bound:
        raise RunFailed(
            f"the model loaded from {folder} does not compute what it did when it was saved: logits differ by "
            f"{error:.1e} of the largest, more than {bound:.1e}; {_name_differing(engine, folder, ranks)}"
        )


def _compute_logits(engine: Engine, whole: Mapping[str, Tensor], ranks: Ranks) -> Tensor:
    """Logits at the chosen positions of a whole row, from each process's slice; zero where nobody holds one."""
    num_tokens = whole["input_ids_BT"].shape[1] // ranks.sequence_degree
    first = ranks.sequence_rank * num_tokens
    own = {name: tensor[:, first : first + num_tokens].to(engine.device) for name, tensor in whole.items()}
    logits_TV = engine.compute_logits(own["input_ids_BT"], own["document_start_BT"])[0].float()
    gathered = logits_TV.new_zeros(NUM_POSITIONS, logits_TV.shape[-1])
    for index, position in enumerate(_choose_positions(whole["input_ids_BT"].shape[1])):
        if ranks.data_rank == 0 and first <= position < first + num_tokens:
            gathered[index] = logits_TV[position - first]
    return sum_tensor(gathered).cpu()


def _choose_positions(num_tokens: int) -> list[int]:
    return [(index + 1) * num_tokens // NUM_POSITIONS - 1 for index in range(NUM_POSITIONS)]


def _join(part: Tensor, ranks: Ranks, device: torch.device) -> Tensor:
    """The slices of data rank 0 as one row, in their order."""
    num_tokens = part.shape[1]
    whole = torch.zeros(1, num_tokens * ranks.sequence_degree, dtype=torch.int64, device=device)
    if ranks.data_rank == 0:
        first = ranks.sequence_rank * num_tokens
        whole[:, first : first + num_tokens] = part.to(device)
    return sum_tensor(whole).to(part.dtype).cpu()


def _name_differing(engine: Engine, folder: Path, ranks: Ranks) -> str:
    """The groups of parameters (a block's part, the embedding) that are not as the file has them."""
    weights, groups = engine.gather_weights(), dict[str, None]()
    if ranks.is_main:
        for name, saved in load_file(folder / WEIGHTS_NAME).items():
            if not torch.equal(weights[name], saved):
                groups[".".join(name.split(".")[:3] if name.startswith("blocks.") else name.split(".")[:1])] = None
    names = broadcast_object(list(groups))
    if names:
        return f"parameters that differ from the file: {', '.join(names)}; load with the program that saved it"
    return "all parameters are those of the file, so the program computes otherwise: compare packages and kernels"
