"""The language model: embedding, blocks, norm, head. It knows no ranks.

Embedding rows have length about 1, as a tied head needs, and enter the residual stream times D^(1/4). Without a factor
the first norm multiplies their gradient by sqrt(D), and early steps overshoot; at sqrt(D), unit variance, a tied head
starts by answering every token with itself, at a logit of sqrt(D).

Dims: B batch, T tokens, D model width, V vocabulary.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.linear_cross_entropy.reference import Reduction
from prism_lm.model.block import Block
from prism_lm.model.config import ModelConfig
from prism_lm.model.decode_state import DecodeState
from prism_lm.model.init import initialise
from prism_lm.model.operators import Operators, build_plain_operators

IGNORED_LABEL = -100


def embedding_scale_of(model_width: int) -> float:
    """What an embedding row is multiplied by as it enters the residual stream."""
    return model_width**0.25


class LanguageHead(nn.Module):
    """Owns the V x D weight and everything that is computed with it, so that a sharded weight is gathered once."""

    def __init__(self, config: ModelConfig, *, operators: Operators) -> None:
        super().__init__()
        self.run_loss = operators.linear_cross_entropy
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.model_width))

    def tie_to(self, embedding: nn.Embedding) -> None:
        """Share the embedding's parameter, as one object."""
        self.register_parameter("weight", cast(nn.Parameter, embedding.weight))

    def forward(self, hidden_BTD: Tensor, labels_BT: Tensor | None = None, reduction: Reduction = "sum") -> Tensor:
        """With labels the cross-entropy in nats, fp32: summed, or BT with 0 where the label is -100. Without them the
        logits BTV in fp32 or wider."""
        if labels_BT is None:
            logits_BTV = functional.linear(hidden_BTD, self.weight)
            return logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        loss = self.run_loss(
            hidden_BTD.flatten(0, 1),
            self.weight,
            labels_BT.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction=reduction,
        )
        return loss.view_as(labels_BT) if reduction == "none" else loss


class LanguageModel(nn.Module):
    """Next-token model over packed rows. Its weights are those of seed 0 until `initialise` draws others.

    `operators` are those of plain torch unless others are given; parallelism is put on from outside, by their scan.
    """

    def __init__(self, config: ModelConfig, *, operators: Operators | None = None) -> None:
        super().__init__()
        operators = operators or build_plain_operators()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.model_width)
        self.embedding_scale = embedding_scale_of(config.model_width)
        self.blocks = nn.ModuleList(
            Block(config, mixer, operators=operators, layer=layer) for layer, mixer in enumerate(config.layer_mixers())
        )
        self.final_norm = nn.RMSNorm(config.model_width, eps=config.norm_eps)
        self.head = LanguageHead(config, operators=operators)
        self.tie_weights()
        if not self.embedding.weight.is_meta:
            initialise(self, seed=0)

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's where the configuration says so; moving off meta undoes it."""
        if self.config.tie_embeddings:
            self.head.tie_to(self.embedding)

    def forward(
        self,
        input_ids_BT: Tensor,
        document_start_BT: Tensor | None,
        labels_BT: Tensor | None,
        *,
        reduction: Reduction = "sum",
    ) -> Tensor:
        """Cross-entropy in nats, fp32, over labels other than -100: summed, or of each token (BT, 0 where ignored).

        With labels_BT None the logits BTV, fp32 or wider.

        input_ids_BT and labels_BT int64 below vocab_size; document_start_BT bool, true at a document's first token.
        """
        hidden_BTD = self._embed(input_ids_BT)
        for block in self.blocks:
            # A state that is kept, even until the next layer returns, is memory that checkpointing gave up.
            hidden_BTD = block(hidden_BTD, document_start_BT, None)[0]
        return self.head(self.final_norm(hidden_BTD), labels_BT, reduction)

    def logits(
        self,
        input_ids_BT: Tensor,
        *,
        document_start_BT: Tensor | None = None,
        state: DecodeState | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, DecodeState]:
        """Logits BTV, fp32 or wider, and the state after the last token; `state` continues rows read before.

        last_only: of the last token alone, so T = 1.
        """
        hidden_BTD, new_state = self.read(input_ids_BT, document_start_BT=document_start_BT, state=state)
        return self.head(hidden_BTD[:, -1:] if last_only else hidden_BTD), new_state

    def read(
        self, input_ids_BT: Tensor, *, document_start_BT: Tensor | None = None, state: DecodeState | None = None
    ) -> tuple[Tensor, DecodeState]:
        """What the head takes, BTD, for those who need the logits of some tokens only, and the state after the last
        token; `state` continues rows read before."""
        hidden_BTD = self._embed(input_ids_BT)
        states = [None] * len(self.blocks) if state is None else state.layers
        new_states = []
        for block, layer_state in zip(self.blocks, states, strict=True):
            hidden_BTD, new_state = block(hidden_BTD, document_start_BT, layer_state)
            new_states.append(new_state)
        return self.final_norm(hidden_BTD), DecodeState(layers=tuple(new_states))

    def _embed(self, input_ids_BT: Tensor) -> Tensor:
        return self.embedding(input_ids_BT) * self.embedding_scale


def build_model(
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    operators: Operators | None = None,
) -> LanguageModel:
    """A model with the weights of `seed`, allocated once, on `device` in `dtype`; `operators` None: plain torch."""
    with torch.device("meta"):
        model = LanguageModel(config, operators=operators).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    initialise(model, seed=seed)
    return model
