"""A row cut over the processes of a sequence group: what they exchange, and the operators that exchange it.

Dims: R shards of a row, B batch, T tokens of a shard.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from prism_lm.model.operators import Attention, Operators, Scan, ShortConvolution
from prism_lm.parallel.attention_gather import causal_attention_sharded
from prism_lm.parallel.conv_halo import short_conv_sharded


def _find_collective(name: str, older_name: str) -> Callable[..., Any]:
    """Newer releases of torch warn at the older name, older ones lack the newer."""
    return getattr(dist, name if hasattr(dist, name) else older_name)


_all_gather = _find_collective("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _find_collective("reduce_scatter_single", "reduce_scatter_tensor")


class SequenceGroup:
    """This process among those that hold the equal slices of a row, in the order of their ranks.

    Every process of the group must make the same calls in the same order.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.index: int = dist.get_rank(process_group)
        self.count: int = dist.get_world_size(process_group)

    def start_gather(self, payload: Tensor) -> Callable[[], Tensor]:
        """Begins to gather payloads of one shape; what it returns waits and gives them stacked by place (R, ...). No
        gradient."""
        payload = payload.detach().contiguous()
        stacked = payload.new_empty(self.count, *payload.shape)
        work = _all_gather(stacked.view(-1), payload.view(-1), group=self.process_group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return stacked

        return wait

    def sum_own(self, stacked: Tensor) -> Tensor:
        """The sum over processes of what each holds for this place (R, ...); added in fp32 or wider. No gradient."""
        wide = stacked.detach().to(torch.promote_types(stacked.dtype, torch.float32)).contiguous()
        own = wide.new_empty(wide.shape[1:])
        _reduce_scatter(own.view(-1), wide.view(-1), group=self.process_group)
        return own.to(stacked.dtype)

    def gather(self, payload: Tensor) -> Tensor:
        """Payloads of one shape, stacked by place (R, ...); each gradient goes back to its own process."""
        return _gather_outside_graphs(payload, self)

    def gather_tokens(self, slice_BTX: Tensor) -> Tensor:
        """Slices (B, T, ...) of the row, one after the other: (B, R T, ...); gradients as those of `gather`."""
        return self.gather(slice_BTX).transpose(0, 1).flatten(1, 2)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, payload: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group.start_gather(payload)()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None]:
        return ctx.group.sum_own(grad), None


def _gather(payload: Tensor, group: SequenceGroup) -> Tensor:
    return cast(Tensor, _Gather.apply(payload, group))


_gather_outside_graphs = cast(Callable[[Tensor, SequenceGroup], Tensor], torch.compiler.disable(_gather))


def shard_operators(operators: Operators, group: SequenceGroup) -> Operators:
    """The operators for slices of rows: those that read more than their own token read the whole row.

    A state that continues a row is the row's, equal on all processes of the group, and so is what they return. Raises
    ValueError for a scan that has no form for slices.
    """
    if group.count == 1:
        return operators
    short_conv: ShortConvolution = partial(short_conv_sharded, group=group, short_conv=operators.short_conv)
    attention: Attention = partial(causal_attention_sharded, group=group)
    scan: Scan = partial(_find_sharded(operators.scan), group=group)
    return replace(operators, scan=scan, step=None, short_conv=short_conv, attention=attention)


def _find_sharded(scan: Scan) -> Callable[..., tuple[Tensor, Tensor]]:
    from kernels.prism.chunk_reference import prism_scan_chunked

    if scan is prism_scan_chunked:
        from kernels.prism.sharded_reference import prism_scan_chunked_sharded

        return prism_scan_chunked_sharded
    from kernels.prism.chunk import prism_scan

    if scan is prism_scan:
        from kernels.prism.sharded import prism_scan_sharded

        return prism_scan_sharded
    name = getattr(scan, "__name__", str(scan))
    raise ValueError(
        f"scan={name} must be one with a form for slices of rows, prism_scan_chunked or prism_scan, to be cut over "
        "processes; use one of them, or parallel.sequence_degree=1"
    )
