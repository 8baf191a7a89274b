"""A prompt read by all processes together, a slice each.

Dims: B batch (prompts), T tokens, V vocabulary.
"""

from torch import Tensor
from torch.nn import functional

from prism_lm.model.decode_state import DecodeState
from prism_lm.model.lm import LanguageModel
from prism_lm.parallel.collectives import broadcast_tensor
from prism_lm.parallel.mesh import Ranks


def read_prompt(
    model: LanguageModel, ranks: Ranks, input_ids_BT: Tensor, document_start_BT: Tensor
) -> tuple[Tensor, DecodeState]:
    """Logits (B, 1, V) after the last token and the state of the whole prompt, equal on every rank.

    `model` runs on operators for cut rows; all ranks of the run are one sequence group and pass the same prompts, which
    start with a document. They are padded on the left, with tokens of a document of their own, to equal slices.
    """
    padding = -input_ids_BT.shape[1] % ranks.sequence_degree
    parts = [
        functional.pad(tensor, (padding, 0)).chunk(ranks.sequence_degree, dim=1)[ranks.sequence_rank]
        for tensor in (input_ids_BT, document_start_BT)
    ]
    logits_BTV, state = model.logits(parts[0], document_start_BT=parts[1], last_only=True)
    return broadcast_tensor(logits_BTV, source=ranks.world_size - 1), state
