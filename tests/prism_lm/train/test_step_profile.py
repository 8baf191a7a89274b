"""Which kind of work a kernel is, from its name and the operations around it, and sums over a profile's events."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from prism_lm.train.step_profile import OTHER, find_kind, sum_kernels


@dataclass
class Kernel:
    name: str
    duration: float


@dataclass
class Event:
    name: str
    cpu_parent: Any = None
    kernels: list[Kernel] = field(default_factory=list)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ("sm90_xmma_gemm_bf16 aten::mm aten::linear", "matrix products"),
        ("nvjet_tst_128x256 aten::mm MmBackward0", "matrix products"),
        ("state_kernel prism::chunk_scan", "scan"),
        ("forward_kernel prism::short_conv", "convolution"),
        ("backward_kernel prism::gated_rms_norm_backward", "norms"),
        ("row_loss_kernel _SumLoss", "loss"),
        ("nvjet aten::mm _SumLoss", "loss"),
        ("multi_tensor_apply_kernel aten::_fused_adamw_ bench::update", "optimizer"),
        ("chunk_gated_delta_rule_fwd_kernel_h ChunkGatedDeltaRuleFunction", "scan"),
        ("swiglu_backward_kernel prism::swiglu_backward", "keys and SwiGLU"),
        ("vectorized_elementwise_kernel aten::add", OTHER),
    ],
)
def test_kernel_is_sorted_by_its_name_and_surroundings(names: str, kind: str) -> None:
    assert find_kind(names) == kind


def test_kernels_are_summed_under_the_operations_that_launched_them() -> None:
    update = Event("bench::update")
    events = [
        update,
        Event("aten::_fused_adamw_", update, [Kernel("adam", 3.0), Kernel("adam", 4.0)]),
        Event("aten::mm", Event("MmBackward0"), [Kernel("nvjet", 5.0)]),
        Event("aten::add", None, [Kernel("add", 1.0)]),
    ]
    kinds, kernels = sum_kernels(events)
    assert kinds == {"optimizer": 7.0, "matrix products": 5.0, OTHER: 1.0}
    assert kernels == {"adam": 7.0, "nvjet": 5.0, "add": 1.0}
