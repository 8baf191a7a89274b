"""Log-likelihoods of the last tokens of many rows, every beginning that rows share read once.

Batches and sums depend on the rows alone: neither their order nor the number of processes changes a bit of a result.
Dims: B rows of a batch, T tokens, D model width, N scored tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prism_lm.eval.batch_plan import STATE_BYTES, Batch, Budget, choose_batch_tokens, plan_batches, share_out
from prism_lm.eval.progress import Progress, Share
from prism_lm.eval.token_tree import TokenTree, build_tree
from prism_lm.model.decode_state import DecodeState, LayerState
from prism_lm.model.lm import LanguageModel
from prism_lm.model.prefill import choose_piece_length, pad_left
from prism_lm.parallel.collectives import call_together, gather_objects
from prism_lm.parallel.mesh import Ranks

GRAIN_TOKENS = 16
SLICE_LOGITS = 2**25
"Logits that are held at once, fp32: 128 MiB and what a softmax needs beside them."


@dataclass(frozen=True)
class ScoredRow:
    """A document's tokens, of which the last `num_scored`, at least 1 and not the first, are scored."""

    tokens: Sequence[int]
    num_scored: int


@dataclass(frozen=True)
class Likelihood:
    """Sum over a row's scored tokens, in nats, and whether each of them was the likeliest."""

    log_likelihood: float
    is_greedy: bool


def score_rows(
    model: LanguageModel,
    rows: Sequence[ScoredRow],
    *,
    batch_tokens: int,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> list[Likelihood]:
    """The likelihood of every row, on every rank; the ranks share the work. All of them pass the same rows.

    At most batch_tokens are read at once, padding counted; a longer row is read in pieces. Raises RunFailed on all
    ranks for what fails on any.
    """
    ranks = ranks or Ranks()
    if not rows:
        return []
    reader = call_together(lambda: _read_share(model, rows, batch_tokens, ranks, progress))
    parts = [part for gathered in gather_objects(reader.parts) for part in gathered]
    call_together(reader.share.end)
    return _join(parts, len(rows))


@dataclass(frozen=True, order=True)
class _Part:
    """What some consecutive scored tokens of a row came to."""

    row: int
    first_token: int
    log_likelihood: float
    is_greedy: bool


def _join(parts: list[_Part], num_rows: int) -> list[Likelihood]:
    sums, greedy = [0.0] * num_rows, [True] * num_rows
    for part in sorted(parts):
        sums[part.row] += part.log_likelihood
        greedy[part.row] &= part.is_greedy
    return [Likelihood(*pair) for pair in zip(sums, greedy, strict=True)]


def _read_share(
    model: LanguageModel, rows: Sequence[ScoredRow], batch_tokens: int, ranks: Ranks, progress: Progress | None
) -> "_Reader":
    tree = build_tree([row.tokens[:-1] for row in rows], grain_tokens=GRAIN_TOKENS)
    tops = plan_batches(tree, measure_budget(model, choose_batch_tokens(batch_tokens, tree.num_tokens)))
    batches = [batch for top in tops for batch in top.walk()]
    owners = share_out([batch.padded_tokens for batch in batches], ranks.world_size)
    owned = {id(batch) for batch, owner in zip(batches, owners, strict=True) if owner == ranks.rank}
    share = Share(
        progress,
        "loglikelihood",
        num_requests=len(rows),
        num_tokens=sum(batch.padded_tokens for batch in batches),
        own_tokens=sum(batch.padded_tokens for batch in batches if id(batch) in owned),
    )
    reader = _Reader(model=model, rows=rows, tree=tree, batch_tokens=batch_tokens, owned=owned, share=share)
    for top in tops:
        reader.read(top, None)
    return reader


@torch.no_grad()
def measure_budget(model: LanguageModel, batch_tokens: int, *, state_bytes: int | None = None) -> Budget:
    """The budget with the size of this model's state, found by reading two tokens. state_bytes None: an eighth of a
    GPU's memory, which may hold the states of a batch thrice, or STATE_BYTES."""
    device = next(model.parameters()).device
    if state_bytes is None:
        is_gpu = device.type == "cuda"
        state_bytes = torch.cuda.get_device_properties(device).total_memory // 8 if is_gpu else STATE_BYTES
    one, two = (
        model.read(torch.zeros(1, num_tokens, dtype=torch.int64, device=device))[1].num_bytes() for num_tokens in (1, 2)
    )
    return Budget(
        batch_tokens=batch_tokens,
        row_state_bytes=2 * one - two,
        token_state_bytes=two - one,
        state_bytes=state_bytes,
    )


def select_rows(state: DecodeState, rows: Sequence[int]) -> DecodeState:
    """The state of those rows of a batch, copied; a row may be taken several times."""
    index_B = torch.tensor(list(rows), device=state.layers[0][0].device)
    return DecodeState(layers=tuple(_select(layer, index_B) for layer in state.layers))


def _select(layer: LayerState, index_B: Tensor) -> LayerState:
    selected = [None if tensor is None else tensor.index_select(0, index_B) for tensor in layer]
    return type(layer)(*selected)  # pyright: ignore[reportArgumentType]


def pad_right(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows that continue others as one batch, int64 BT; padding (id 0) comes after what counts."""
    input_ids_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, tokens in enumerate(rows):
        input_ids_BT[row, : len(tokens)] = torch.tensor(tokens)
    return input_ids_BT


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Scored tokens of one row that one node's hidden tokens answer for, from `first` on within the node."""

    row: int
    first: int
    first_token: int
    targets: Sequence[int]

    def cut(self, begin: int, end: int) -> "_Span | None":
        """What of it lies within those tokens of the node."""
        first, last = max(self.first, begin), min(self.first + len(self.targets), end)
        if first >= last:
            return None
        skipped = first - self.first
        targets = self.targets[skipped : last - self.first]
        return replace(self, first=first, first_token=self.first_token + skipped, targets=targets)


@dataclass(kw_only=True)
class _Reader:
    """Reads batches depth first, so that only the states on the way from the top are kept."""

    model: LanguageModel
    rows: Sequence[ScoredRow]
    tree: TokenTree
    batch_tokens: int
    owned: set[int]
    share: Share
    parts: list[_Part] = field(default_factory=list[_Part])

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.spans: list[list[_Span]] = [[] for _ in self.tree.nodes]
        for row, leaf in enumerate(self.tree.leaf_of_row):
            for node in self.tree.find_path(leaf):
                self._add_span(row, node)

    def _add_span(self, row: int, node: int) -> None:
        """What the node's tokens have to do with the row's scored ones, if anything."""
        tokens, held = self.rows[row].tokens, self.tree.nodes[node]
        begin = max(held.depth, len(tokens) - 1 - self.rows[row].num_scored)
        end = min(held.depth + len(held.tokens), len(tokens) - 1)
        if begin < end:
            targets = tokens[begin + 1 : end + 1]
            self.spans[node].append(_Span(row=row, first=begin - held.depth, first_token=begin, targets=targets))

    @torch.no_grad()
    def read(self, batch: Batch, above: DecodeState | None) -> None:
        """Read a batch and those below it, where any of them is this process's to score."""
        if not any(id(below) in self.owned for below in batch.walk()):
            return
        state = self._read_batch(batch, None if above is None else select_rows(above, batch.parent_rows))
        if id(batch) in self.owned:
            self.share.advance(batch.padded_tokens)
        for child in batch.children:
            self.read(child, state)

    def _read_batch(self, batch: Batch, state: DecodeState | None) -> DecodeState:
        """The state after a batch, read at once or, where it is one long row, in pieces."""
        tokens = [self.tree.nodes[node].tokens for node in batch.nodes]
        padding = [0 if batch.parent_rows else batch.row_tokens - len(row) for row in tokens]
        input_ids_BT, document_start_BT = (
            (pad_right(tokens), None) if batch.parent_rows else pad_left([list(row) for row in tokens])
        )
        piece_tokens = batch.row_tokens
        if batch.padded_tokens > self.batch_tokens:
            piece_tokens = choose_piece_length(len(tokens), self.model.config.chunk_tokens, self.batch_tokens)
        for first in range(0, batch.row_tokens, piece_tokens):
            piece_BT, starts_BT = (
                None if whole_BT is None else whole_BT[:, first : first + piece_tokens].to(self.device)
                for whole_BT in (input_ids_BT, document_start_BT)
            )
            assert piece_BT is not None
            hidden_BTD, state = self.model.read(piece_BT, document_start_BT=starts_BT, state=state)
            if id(batch) in self.owned:
                self._score(batch, padding, first, hidden_BTD)
        assert state is not None
        return state

    def _score(self, batch: Batch, padding: list[int], first: int, hidden_BTD: Tensor) -> None:
        """Score what hidden tokens from column `first` on answer for."""
        end = first + hidden_BTD.shape[1]
        cuts = [
            (row, cut)
            for row, node in enumerate(batch.nodes)
            for span in self.spans[node]
            if (cut := span.cut(first - padding[row], end - padding[row])) is not None
        ]
        if not cuts:
            return
        lengths = [len(cut.targets) for _, cut in cuts]
        columns = [cut.first + padding[row] - first + np.arange(len(cut.targets)) for row, cut in cuts]
        row_N = np.repeat([row for row, _ in cuts], lengths)
        target_N = np.concatenate([np.asarray(cut.targets) for _, cut in cuts])
        places = (torch.from_numpy(array).to(self.device) for array in (row_N, np.concatenate(columns), target_N))
        log_likelihood_N, greedy_N = self._compare(hidden_BTD, *places)
        begins = np.cumsum([0, *lengths[:-1]])
        sums, greedy = np.add.reduceat(log_likelihood_N, begins), np.logical_and.reduceat(greedy_N, begins)
        for (_, cut), total, is_greedy in zip(cuts, sums, greedy, strict=True):
            self.parts.append(_Part(cut.row, cut.first_token, float(total), bool(is_greedy)))

    def _compare(
        self, hidden_BTD: Tensor, row_N: Tensor, column_N: Tensor, target_N: Tensor
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Log-likelihoods of the targets, from logits of fp32 or wider, and whether each is the likeliest token."""
        size = max(SLICE_LOGITS // self.model.config.vocab_size, 1)
        found: list[Tensor] = []
        greedy: list[Tensor] = []
        for first in range(0, len(target_N), size):
            part = slice(first, first + size)
            logits_NV, target_N1 = self.model.head(hidden_BTD[row_N[part], column_N[part]]), target_N[part, None]
            found.append((logits_NV.gather(1, target_N1)[:, 0] - logits_NV.logsumexp(1)).double())
            greedy.append(logits_NV.argmax(1) == target_N1[:, 0])
        return torch.cat(found).cpu().numpy(), torch.cat(greedy).cpu().numpy()
