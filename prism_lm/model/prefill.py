"""Prompts as one batch, read by the chunk form in pieces of bounded length, each from the state that the last one left:
what a long prompt takes beside a recurrent model's state does not depend on its length.

Dims: B batch (prompts), T tokens, V vocabulary.
"""

import torch
from torch import Tensor

from prism_lm.model.decode_state import DecodeState
from prism_lm.model.lm import LanguageModel

PIECE_TOKENS = 16384


def pad_left(prompts_ids: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Prompts as one batch, int64 BT and bool BT, all ending in the last column. Padding (id 0) is another document
    than the prompt after it, so that no layer lets the prompt see it."""
    num_tokens = max(len(prompt) for prompt in prompts_ids)
    input_ids_BT = torch.zeros(len(prompts_ids), num_tokens, dtype=torch.int64)
    document_start_BT = torch.zeros(len(prompts_ids), num_tokens, dtype=torch.bool)
    for row, prompt in enumerate(prompts_ids):
        first = num_tokens - len(prompt)
        input_ids_BT[row, first:] = torch.tensor(prompt)
        document_start_BT[row, first] = True
    return input_ids_BT, document_start_BT


def read_in_pieces(
    model: LanguageModel, input_ids_BT: Tensor, document_start_BT: Tensor, *, piece_tokens: int = PIECE_TOKENS
) -> tuple[Tensor, DecodeState]:
    """Logits (B, 1, V) after the last token and the state of the whole prompts; no piece has more than piece_tokens
    tokens of all rows together, but at least a chunk of each row. Only the last one goes through the head."""
    length = choose_piece_length(len(input_ids_BT), model.config.chunk_tokens, piece_tokens)
    *pieces, last = zip(input_ids_BT.split(length, dim=1), document_start_BT.split(length, dim=1), strict=True)
    state = None
    for ids_BT, start_BT in pieces:
        _, state = model.read(ids_BT, document_start_BT=start_BT, state=state)
    return model.logits(last[0], document_start_BT=last[1], state=state, last_only=True)


def choose_piece_length(num_rows: int, chunk_tokens: int, piece_tokens: int) -> int:
    """Tokens of a row in a piece: whole chunks, so that the cuts are those of the prompt read at once."""
    return max(1, piece_tokens // num_rows // chunk_tokens) * chunk_tokens
