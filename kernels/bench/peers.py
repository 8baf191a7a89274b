"""Other people's operators on the scan's inputs. They are optional: one that is missing or refuses is named as absent.

A rank-1 peer gets the first pair's key and step size, and the residual as its value. A peer is imported as it runs.

Dims: B batch, T tokens, H heads, K key width, V value width, M written pairs, J = 2 T Householder steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch
import torch.nn.functional as F

from kernels.bench.measure import Forward, Leaves

PRODUCT_STEPS = 2
SDPA_MAX_TOKENS = 131072


@dataclass(frozen=True, kw_only=True)
class Peer:
    """An operator and how it takes the leaves of a scan with `solver_steps` written pairs."""

    name: str
    prepare: Callable[[Leaves], Leaves]
    forward: Forward
    solver_steps: int = 1
    is_baseline: bool = False
    max_tokens: int = 2**30


def find_version(distribution: str) -> str:
    """The version that is installed, or "absent"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def take_first_pair(leaves: Leaves) -> Leaves:
    """Query, key, value (B, T, H, .), log decay and step size (B, T, H), each contiguous and a leaf."""
    query, key, residual, _, step_size, log_decay = leaves
    return _make_leaves(query, key[:, :, 0], residual, log_decay, step_size[:, :, 0])


def interleave_pairs(leaves: Leaves) -> Leaves:
    """The same with two keys, values and step sizes a token, (B, J, H, .) and (B, J, H)."""
    query, key, residual, gain, step_size, log_decay = leaves
    value = torch.stack([residual, gain[:, :, 1]], 2)
    return _make_leaves(query, *(x.flatten(1, 2) for x in (key, value)), log_decay, step_size.flatten(1, 2))


def put_heads_first(leaves: Leaves) -> Leaves:
    """Query, key and value as attention takes them, (B, H, T, .)."""
    query, key, residual, *_ = leaves
    return _make_leaves(*(x.transpose(1, 2) for x in (query, key[:, :, 0], residual)))


def _make_leaves(*tensors: torch.Tensor) -> Leaves:
    return [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in tensors]


def run_gated_delta_rule(leaves: Leaves) -> torch.Tensor:
    """flash-linear-attention's gated delta rule, which writes one pair a token."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    query, key, value, log_decay, step_size = leaves
    return chunk_gated_delta_rule(query, key, value, log_decay, step_size, output_final_state=True)[0]


def run_gated_delta_product(leaves: Leaves) -> torch.Tensor:
    """Its gated delta product: two forgetting writes a token."""
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    query, key, value, log_decay, step_size = leaves
    return chunk_gated_delta_product(query, key, value, log_decay, step_size, PRODUCT_STEPS, output_final_state=True)[0]


def run_attention(leaves: Leaves) -> torch.Tensor:
    """torch's causal attention."""
    return F.scaled_dot_product_attention(*leaves, is_causal=True)


def run_recurrent_step(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Its decode step, from a state in fp32 to the next one."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    query, key, value, log_decay, step_size, state_BHKV = inputs
    return fused_recurrent_gated_delta_rule(
        query, key, value, g=log_decay, beta=step_size, initial_state=state_BHKV, output_final_state=True
    )[0]


SCAN_PEERS = (
    Peer(name="fla rank 1", prepare=take_first_pair, forward=run_gated_delta_rule, is_baseline=True),
    Peer(name="fla product 2", prepare=interleave_pairs, forward=run_gated_delta_product, solver_steps=PRODUCT_STEPS),
    Peer(name="torch SDPA", prepare=put_heads_first, forward=run_attention, max_tokens=SDPA_MAX_TOKENS),
)
