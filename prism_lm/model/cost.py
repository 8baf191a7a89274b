"""What a model costs, from its configuration alone: parameters, FLOPs of the chunk form, state and optimizer bytes.

Importing this file loads no torch. A multiplication and its addition are 2 FLOPs. Elementwise work (norms, SiLU, the
solver's loop) and the chunk form's triangular inverse are not counted.
Letters: D model width, H heads, K key width, V value width, L solver steps, M written pairs, C tokens in a chunk.
"""

from typing import Literal

from prism_lm.model.config import INNER_WIDTH_RATIO, Mixer, ModelConfig, projection_widths

Precision = Literal["fp32", "bf16"]
STATE_ELEMENT_BYTES = 4
GRADIENT_BYTES = 4
_WEIGHT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2}


def count_parameters(config: ModelConfig) -> int:
    """Trainable numbers of the whole model; a tied head counts once."""
    blocks = sum(_block_matrices(config, mixer) + _block_vectors(config, mixer) for mixer in config.layer_mixers())
    tables = 1 if config.tie_embeddings else 2
    return blocks + tables * config.vocab_size * config.model_width + config.model_width


def flops_per_token(config: ModelConfig, row_tokens: int) -> int:
    """Training FLOPs a token, forward and backward, in rows of `row_tokens` read as one document.

    A matrix costs three products, one forward and two backward. The scan is counted as the chunk form of full chunks;
    causal attention at half of its square; nothing recomputed is counted, neither is the embedding look-up. Of a peer's
    layer only the parameters are known, not its recurrence, so that speed/mfu_pct is then too low.
    """
    head = 6 * config.vocab_size * config.model_width
    return head + sum(_block_flops(config, mixer, row_tokens) for mixer in config.layer_mixers())


def state_bytes(config: ModelConfig, *, context_tokens: int = 2048, element_bytes: int = 2) -> int:
    """Bytes kept to continue one row: fp32 fast weights and the convolution's window for a recurrent layer, which do
    not depend on context_tokens; keys and values of every token read for an attention layer; nothing for a peer's
    layer, which keeps none.

    element_bytes: of an activation, 2 for bf16.
    """
    return sum(_layer_state_bytes(config, mixer, context_tokens, element_bytes) for mixer in config.layer_mixers())


def optimizer_bytes(config: ModelConfig, *, precision: Precision = "bf16") -> int:
    """Bytes that AdamW keeps over all ranks: two fp32 moments, and the fp32 master weights where weights are bf16."""
    bytes_each = {"fp32": 8, "bf16": 12}[precision]
    return bytes_each * count_parameters(config)


def checkpoint_bytes(config: ModelConfig, *, precision: Precision = "bf16") -> int:
    """Bytes of one checkpoint but for its small files: weights as the model runs in them, fp32 masters, two moments."""
    return (_WEIGHT_BYTES[precision] + 12) * count_parameters(config)


def training_bytes(config: ModelConfig, *, precision: Precision = "bf16") -> int:
    """Bytes over all ranks of weights, gradients and optimizer, without activations. Gradients are summed and kept in
    fp32 whatever the precision of the weights."""
    weights = (_WEIGHT_BYTES[precision] + GRADIENT_BYTES) * count_parameters(config)
    return weights + optimizer_bytes(config, precision=precision)


def scan_flops_per_token(config: ModelConfig, mixer: Mixer, row_tokens: int) -> int:
    """Forward and backward FLOPs a token of the chunk form's matrix products, all heads of one layer.

    Forward: four C x C products (two with keys, two with values) and three with the state; each written pair from the
    second on adds two of each width and one with the state; linear attention writes its one pair as a second. Backward:
    every product twice, but k k^T once, as one product (X + X^T) k is the gradient of both its operands.
    """
    chunk = min(config.chunk_tokens, row_tokens)
    key, value = config.key_width, config.value_width
    extra = {"prism": config.write_steps - 1, "linear_attention": 1}.get(mixer, 0)
    square = 2 * chunk * (key + value)
    with_state = 2 * key * value
    forward = 2 * square + 3 * with_state + extra * (2 * square + with_state)
    return config.num_heads * (3 * forward - 2 * chunk * key)


def inner_flops_per_token(config: ModelConfig) -> int:
    """Forward and backward FLOPs a token of TTT's inner steps as matrix products, all heads of one layer.

    A step multiplies by W1 and W2, by W2 transposed, and takes an outer product off each; the query is multiplied by W1
    and W2. Each product's backward is two more.
    """
    matrix = INNER_WIDTH_RATIO * config.key_width * config.value_width
    return config.num_heads * 3 * 7 * 2 * matrix


def _block_flops(config: ModelConfig, mixer: Mixer, row_tokens: int) -> int:
    products = 6 * _block_matrices(config, mixer)
    if mixer == "peer":
        return products
    if mixer == "attention":
        return products + 3 * row_tokens * config.num_heads * (config.key_width + config.value_width)
    convolution = 6 * config.conv_width * _conv_channels(config, mixer)
    if mixer == "ttt":
        return products + convolution + inner_flops_per_token(config)
    return products + convolution + scan_flops_per_token(config, mixer, row_tokens)


def _block_matrices(config: ModelConfig, mixer: Mixer) -> int:
    """Parameters of a block that multiply as matrices."""
    return _mixer_matrices(config, mixer) + 3 * config.model_width * config.mlp_width


def _block_vectors(config: ModelConfig, mixer: Mixer) -> int:
    """Parameters of a block's norms, convolution, decay and inner model's start."""
    norms = 2 * config.model_width
    if mixer == "attention":
        return norms
    if mixer == "peer":
        return norms + _count_peer(config)[1]
    has_rates = mixer in ("prism", "gated_delta") and config.decay == "gated_delta"
    decay = 2 * config.num_heads if has_rates else 0
    inner = _inner_weights(config) + 2 * config.num_heads * config.value_width if mixer == "ttt" else 0
    return norms + config.conv_width * _conv_channels(config, mixer) + decay + inner + config.value_width


def _inner_weights(config: ModelConfig) -> int:
    """Numbers in W1 and W2 of all heads of a TTT layer."""
    return 2 * config.num_heads * INNER_WIDTH_RATIO * config.key_width * config.value_width


def _mixer_matrices(config: ModelConfig, mixer: Mixer) -> int:
    width, heads = config.model_width, config.num_heads
    output = heads * config.value_width * width
    if mixer == "peer":
        return _count_peer(config)[0]
    if mixer == "prism":
        return width * sum(projection_widths(config).values()) + _solver_matrices(config) + 2 * output
    query_key_value = width * heads * (2 * config.key_width + config.value_width)
    if mixer == "attention":
        return query_key_value + output
    step_sizes_and_decay = {"gated_delta": 2, "ttt": 1}.get(mixer, 0) * width * heads
    return query_key_value + 2 * output + step_sizes_and_decay


def _count_peer(config: ModelConfig) -> tuple[int, int]:
    """A peer's parameters of two and more dims, its convolutions with them, and its vectors. Loads torch and the
    package that the layer is from."""
    from prism_lm.model.peer_mixer import count_peer_parameters

    return count_peer_parameters(config)


def _solver_matrices(config: ModelConfig) -> int:
    """Parameters of the outer r -> keys and r -> gains of a factored solver."""
    key_width, value_width = config.num_heads * config.key_width, config.num_heads * config.value_width
    num_gains = config.solver_steps if config.gain == "learned" else 0
    return config.solver_rank * ((config.write_steps - 1) * key_width + num_gains * value_width)


def _conv_channels(config: ModelConfig, mixer: Mixer) -> int:
    match mixer:
        case "prism":
            return config.model_width if config.anchor == "shortconv" else 0
        case "gated_delta" | "linear_attention" | "ttt":
            return config.num_heads * (2 * config.key_width + config.value_width)
        case "attention" | "peer":
            return 0


def _layer_state_bytes(config: ModelConfig, mixer: Mixer, context_tokens: int, element_bytes: int) -> int:
    if mixer == "peer":
        return 0
    if mixer == "attention":
        return context_tokens * config.num_heads * (config.key_width + config.value_width) * element_bytes
    scan_state = config.num_heads * config.key_width * config.value_width
    fast_weights = _inner_weights(config) if mixer == "ttt" else scan_state
    return fast_weights * STATE_ELEMENT_BYTES + (config.conv_width - 1) * _conv_channels(config, mixer) * element_bytes
