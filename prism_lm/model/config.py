"""What a model is: widths, layers and the switches of the recurrence.

Importing this file loads no torch, so that help texts stay fast. Named sizes are in prism_lm/model/sizes.py.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from kernels.prism.activation import Activation

Mixer = Literal["prism", "gated_delta", "linear_attention", "ttt", "attention", "peer"]
Anchor = Literal["shortconv", "none"]
Gain = Literal["learned", "constant"]
Decay = Literal["gated_delta", "sigmoid"]

MAX_SOLVER_STEPS = 4
HEAD_WIDTH_MULTIPLE = 16
ALIGNED_ROWS = 8
CHUNK_LENGTHS_TOKENS = (16, 32, 64, 128)
INNER_WIDTH_RATIO = 4
"F / K of the MLP inside a TTT head."


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A language model. The defaults are the 350m size; every ablation is a switch here, never another class."""

    vocab_size: int = 32000
    "Rows of the embedding and of the head; at least the vocabulary of the tokenizer that data.path was prepared with."
    model_width: int = 1024
    "Width D of the residual stream."
    num_layers: int = 24
    "Blocks; each is one mixer and one SwiGLU MLP."
    num_heads: int = 8
    "Heads H of every mixer."
    key_width: int = 128
    "Width K of a head's queries and keys; a multiple of 16."
    value_width: int = 128
    """Width V of a head's values; a multiple of 16. Where num_heads * value_width differs from model_width, the
    solver's first residual r = v - u takes u through a learned projection to that width; where they agree u is cut in
    heads."""
    mlp_width: int = 2304
    "Inner width of the SwiGLU MLP."
    mixer: Mixer = "prism"
    """The mixer of every layer: prism; gated_delta (Gated DeltaNet); linear_attention (S + v k^T, no decay); ttt
    (TTT-MLP, one token after another in plain torch: slow); attention (causal softmax attention with RoPE);
    peer (model.peer_layer of flash-linear-attention: training and whole rows on CUDA, no decoding)."""
    layer_pattern: list[Mixer] = field(default_factory=list[Mixer])
    """Mixers of a hybrid, repeated over the layers, such as [prism, prism, prism, attention]; its length divides
    num_layers. Empty: every layer is `mixer`."""
    peer_layer: str = ""
    """Class of fla.layers that model.mixer=peer trains, such as GatedDeltaNet, Mamba2 or GatedLinearAttention, with its
    own initial values; widths and heads are those given here where its constructor takes them."""
    peer_options: dict[str, Any] = field(default_factory=dict[str, Any])
    "More arguments of that class's constructor, such as {num_householder: 2}; they go before those taken from here."
    solver_steps: int = 2
    "Rank L of PRISM's write, 0 to 4. 0 is the gated delta rule on PRISM's anchor and needs no solver weights."
    solver_rank: int = 128
    """Inner rank r of the solver's projections D -> r -> D (gains, and keys from the second on); below model_width.
    0: full rank."""
    solver_activation: Activation = "gelu"
    "Function in the solver's loop d = f(p * r); identity makes the loop linear (an ablation)."
    anchor: Anchor = "shortconv"
    "Where PRISM's projections read: shortconv, u = SiLU(ShortConv(x)); none, u = x, no convolution and no SiLU."
    gain: Gain = "learned"
    "The solver's gains p: learned, p = W_p u; constant, p = 1 everywhere and no weights (an ablation)."
    decay: Decay = "gated_delta"
    """Decay of the recurrent mixers: gated_delta, log alpha = -exp(A_log) softplus(W_a u + dt_bias); sigmoid,
    alpha = sigmoid(W_a u)."""
    conv_width: int = 4
    "Taps W of the causal depthwise convolution, in tokens."
    chunk_tokens: int = 64
    "Tokens C in a chunk of the scan: 16, 32, 64 or 128. It changes speed, not results."
    tie_embeddings: bool = True
    "Whether the head's weight is the embedding's."
    norm_eps: float = 1e-5
    "Added to the mean square in every RMS norm."
    rope_theta: float = 10000.0
    "Base of the rotary frequencies; read by attention layers only."

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_positive(self)
        _check_heads(self)
        _check_solver(self)
        _check_pattern(self)
        _check_inner_model(self)
        _check_peer(self)

    @property
    def write_steps(self) -> int:
        """Written pairs M a token: max(L, 1)."""
        return max(self.solver_steps, 1)

    def layer_mixers(self) -> tuple[Mixer, ...]:
        """The mixer of each layer, num_layers of them."""
        pattern = self.layer_pattern or [self.mixer]
        return tuple(pattern[layer % len(pattern)] for layer in range(self.num_layers))


def projection_widths(config: ModelConfig) -> dict[str, int]:
    """Rows of the one matrix by which a PRISM mixer reads its anchor u, by what they give, in their order.

    Keys from the second on and gains are given by their inner D -> r where the solver is factored. "unused" fills the
    rows up to a multiple of 8, as fast products in bf16 ask for; heads that are a multiple of 8 leave none.
    """
    keys, values, heads = (config.num_heads * width for width in (config.key_width, config.value_width, 1))
    gains = config.solver_steps if config.gain == "learned" else 0
    has_wider_residual = config.solver_steps > 0 and values != config.model_width
    widths = {
        "query": keys,
        "first_key": keys,
        "value": values,
        "extra_keys": (config.write_steps - 1) * (config.solver_rank or keys),
        "gains": gains * (config.solver_rank or values),
        "anchor": values if has_wider_residual else 0,
        "step_sizes": config.write_steps * heads,
        "decay": heads,
    }
    return {**widths, "unused": -sum(widths.values()) % ALIGNED_ROWS}


def _check_choices(config: ModelConfig) -> None:
    choices = (("mixer", Mixer), ("solver_activation", Activation), ("anchor", Anchor), ("gain", Gain))
    for name, literal in (*choices, ("decay", Decay)):
        _check_choice(f"model.{name}", getattr(config, name), get_args(literal))
    for mixer in config.layer_pattern:
        _check_choice("model.layer_pattern", mixer, get_args(Mixer))


def _check_choice(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key}={value} must be a known choice; use {', '.join(allowed[:-1])} or {allowed[-1]}")


def _check_positive(config: ModelConfig) -> None:
    for name in ("vocab_size", "model_width", "num_layers", "num_heads", "key_width", "value_width", "mlp_width"):
        value = getattr(config, name)
        if value < 1:
            raise ValueError(f"model.{name}={value} must be at least 1; use a positive number")
    for name in ("norm_eps", "rope_theta"):
        value = getattr(config, name)
        if value <= 0:
            raise ValueError(f"model.{name}={value} must be above 0; leave it out for the default")


def _check_heads(config: ModelConfig) -> None:
    for name in ("key_width", "value_width"):
        value = getattr(config, name)
        if value % HEAD_WIDTH_MULTIPLE:
            nearest = max(1, round(value / HEAD_WIDTH_MULTIPLE)) * HEAD_WIDTH_MULTIPLE
            raise ValueError(f"model.{name}={value} must be a multiple of {HEAD_WIDTH_MULTIPLE}; use {nearest}")


def _check_solver(config: ModelConfig) -> None:
    if not 0 <= config.solver_steps <= MAX_SOLVER_STEPS:
        raise ValueError(f"model.solver_steps={config.solver_steps} must be 0 to {MAX_SOLVER_STEPS}; use 2")
    if not 0 <= config.solver_rank < config.model_width:
        raise ValueError(
            f"model.solver_rank={config.solver_rank} must be below model.model_width={config.model_width}; "
            f"use {config.model_width // 8}, or 0 for full rank"
        )
    if config.conv_width < 2:
        raise ValueError(f"model.conv_width={config.conv_width} must be at least 2; use 4, or model.anchor=none")
    if config.chunk_tokens not in CHUNK_LENGTHS_TOKENS:
        raise ValueError(f"model.chunk_tokens={config.chunk_tokens} must be one of 16, 32, 64, 128; use 64")


def _check_pattern(config: ModelConfig) -> None:
    length = len(config.layer_pattern)
    if length and config.num_layers % length:
        fitting = max(1, round(config.num_layers / length)) * length
        raise ValueError(
            f"model.layer_pattern=[{','.join(config.layer_pattern)}] must have a length that divides "
            f"model.num_layers={config.num_layers}; use model.num_layers={fitting}"
        )


def _check_inner_model(config: ModelConfig) -> None:
    if "ttt" in config.layer_mixers() and config.key_width != config.value_width:
        raise ValueError(
            f"model.value_width={config.value_width} must equal model.key_width={config.key_width} for "
            f"model.mixer=ttt, whose inner model adds its input to its output; use model.value_width={config.key_width}"
        )


def _check_peer(config: ModelConfig) -> None:
    has_peer = "peer" in config.layer_mixers()
    if has_peer and not config.peer_layer:
        raise ValueError(
            "model.peer_layer= must name a layer of flash-linear-attention for model.mixer=peer; "
            "for example model.peer_layer=GatedDeltaNet"
        )
    if not has_peer and (config.peer_layer or config.peer_options):
        key = f"peer_layer={config.peer_layer}" if config.peer_layer else f"peer_options={config.peer_options}"
        raise ValueError(f"model.{key} must go with model.mixer=peer; add that, or leave it out")
