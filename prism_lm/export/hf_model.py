"""LanguageModel as Hugging Face transformers (4.57 and 5) sees it: configuration, cache, loss, generation.

An exported folder holds this file and the files of prism_lm and kernels that it needs, so that it loads where our
package is not installed. Where it is, tensors on a CUDA device go through our Triton kernels.

Dims: B batch, T new tokens, D model width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from prism_lm.model.config import ModelConfig
from prism_lm.model.decode_state import DecodeState, LayerState
from prism_lm.model.init import draw_initial_value
from prism_lm.model.lm import IGNORED_LABEL, LanguageModel
from prism_lm.model.operators import Operators, build_plain_operators

try:
    from prism_lm.model.kernels import build_triton_operators as _build_fast
except ImportError:
    _build_fast = None

FAST_DTYPES = (torch.float32, torch.bfloat16)
# transformers 5.24 calls `cache` what was `past_key_values` before; forward takes both.
CACHE_NAME = next(field.name for field in fields(CausalLMOutputWithPast) if field.name in ("cache", "past_key_values"))


class PrismConfig(PretrainedConfig):
    """The fields of ModelConfig, by the same names, and those that every Hugging Face configuration has."""

    model_type = "prism"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "model_width",
        "intermediate_size": "mlp_width",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "tie_word_embeddings": "tie_embeddings",
    }


def read_model_config(config: PretrainedConfig) -> ModelConfig:
    """The model that a configuration describes; fields that it lacks have their defaults. Raises ValueError as
    ModelConfig does."""
    held = {field.name: getattr(config, field.name) for field in fields(ModelConfig) if hasattr(config, field.name)}
    return ModelConfig(**held)


class PrismCache:
    """What all layers remember of the tokens read so far; `forward` brings it up to date in place."""

    is_compileable = False

    def __init__(self) -> None:
        self.state: DecodeState | None = None
        self.num_tokens = 0

    def update(self, state: DecodeState, num_tokens: int) -> None:
        """Takes the state after so many tokens more."""
        self.state = state
        self.num_tokens += num_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far."""
        return self.num_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, some perhaps twice: beam search."""
        self._map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times."""
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These rows alone."""
        self.reorder_cache(indices)

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = DecodeState(layers=tuple(_map_layer(layer, function) for layer in self.state.layers))


def _map_layer(layer: LayerState, function: Callable[[Tensor], Tensor]) -> LayerState:
    return type(layer)(*(None if tensor is None else function(tensor) for tensor in layer))  # pyright: ignore


class PrismForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model. Padding may stand on either side of a row's text; for generation on the left."""

    config_class = PrismConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = True
    _is_stateful = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = LanguageModel(read_model_config(config), operators=build_operators())
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: PrismCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        document_start: Tensor | None = None,
        cache: PrismCache | None = None,
        cache_position: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (fp32), the cache, and with labels their loss.

        input_ids: int64 BT, the new tokens where a cache is given. attention_mask: BT, or of all tokens so far; 1 at
        text, 0 at padding, the text in one piece. labels: BT, the same as input_ids, -100 where nothing is asked; each
        token is asked of the one before it. The loss is their mean in nats, or their sum over num_items_in_batch.
        logits_to_keep: of that many last tokens only (0: all), or of those at these places. document_start: bool BT,
        where documents begin that do not see those before them. use_cache None: unless the model is in training mode.
        cache_position is not read. Raises ValueError for inputs that it cannot take.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("input_ids must be given; this model takes no inputs_embeds")
        held = cache if cache is not None else past_key_values
        num_seen = 0 if held is None else held.get_seq_length()
        starts = find_padding_ends(attention_mask, input_ids.shape[1], num_seen)
        if document_start is not None:
            starts = document_start if starts is None else starts | document_start
        hidden, state = self.model.read(input_ids, document_start_BT=starts, state=None if held is None else held.state)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if (not self.training) if use_cache is None else use_cache:
            held = held if held is not None else PrismCache()
            held.update(state, input_ids.shape[1])
        build_output: Any = CausalLMOutputWithPast
        output = build_output(
            loss=None if labels is None else self._compute_loss(hidden, labels, num_items_in_batch),
            logits=self.model.head(hidden[:, keep]),
            **{CACHE_NAME: held},
        )
        return output.to_tuple() if return_dict is False else output

    def _compute_loss(self, hidden_BTD: Tensor, labels_BT: Tensor, num_items: int | Tensor | None) -> Tensor:
        asked_BT = labels_BT[:, 1:].to(hidden_BTD.device)
        total = self.model.head(hidden_BTD[:, :-1], asked_BT)
        if num_items is None:
            num_items = (asked_BT != IGNORED_LABEL).sum()
        return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No cache of keys and values is made for it: `forward` makes its own."""
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """The embedding as it is. Raises ValueError for another number of rows than it has."""
        num_rows = self.model.config.vocab_size
        if new_num_tokens not in (None, num_rows) or num_rows % (pad_to_multiple_of or 1):
            raise ValueError(f"the vocabulary must keep its {num_rows} rows; train with a larger model.vocab_size")
        return self.model.embedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Gives what no file held the values of seed 0."""
        if module is self.model.head and self.model.config.tie_embeddings:
            return
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta and not getattr(parameter, "_is_hf_initialized", False):
                name, num_layers = names[id(parameter)], self.model.config.num_layers
                parameter.copy_(draw_initial_value(name, parameter.shape, num_layers=num_layers, seed=0))


def find_padding_ends(attention_mask: Tensor | None, num_tokens: int, num_seen: int) -> Tensor | None:
    """True (BT) at the first token after padding on the left; None where no row has any.

    Raises ValueError for a mask that is not of the new tokens or of all, and for text that padding interrupts.
    """
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    if len(shape) != 2 or shape[1] not in (num_tokens, num_seen + num_tokens):
        raise ValueError(
            f"attention_mask must have 2 dims and {num_seen + num_tokens} columns, one a token, not {shape}; leave it "
            "out for rows without padding"
        )
    is_text = attention_mask.bool()
    begins = is_text & ~is_text.roll(1, dims=1)
    begins[:, 0] = False
    is_broken, has_padding = torch.stack([(is_text[:, 0] + begins.sum(1) > 1).any(), begins.any()]).tolist()
    if is_broken:
        raise ValueError("attention_mask must show the text of each row in one piece; pad prompts on the left")
    return begins[:, -num_tokens:] if has_padding else None


def build_operators() -> Operators:
    """Our package's Triton kernels for tensors on a CUDA device where it is installed, plain torch otherwise."""
    plain = build_plain_operators()
    forms = {field.name: getattr(plain, field.name) for field in fields(plain)}
    return Operators(**{name: _choose_by_device(name, form) for name, form in forms.items()})


def _choose_by_device(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The form that the first argument's device asks for; attention has one form."""
    if name == "attention":
        return plain
    return lambda first, *others, **settings: _find_form(name, plain, first)(first, *others, **settings)  # pyright: ignore


def _find_form(name: str, plain: Callable[..., Any], first: Tensor) -> Callable[..., Any]:
    fast = _load_fast() if _is_for_kernels(first) else None
    return plain if fast is None else getattr(fast, name)


def _is_for_kernels(first: Tensor) -> bool:
    return first.is_cuda and first.dtype in FAST_DTYPES


@cache
def _load_fast() -> Operators | None:
    """None where our package or Triton is missing."""
    try:
        return None if _build_fast is None else _build_fast()
    except ImportError:
        return None
