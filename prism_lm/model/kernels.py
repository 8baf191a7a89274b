"""Which kernels a model runs on: the Triton ones, or plain torch.

Importing this file loads neither torch nor Triton.
"""

from typing import Literal, get_args

from prism_lm.model.operators import Operators, build_plain_operators

Kernels = Literal["auto", "triton", "plain"]


def build_triton_operators() -> Operators:
    """Triton kernels: CUDA, fp32 to bf16. Triton is imported here and not before."""
    from kernels.add_norm.fused import add_rms_norm
    from kernels.gated_norm.fused import gated_rms_norm
    from kernels.linear_cross_entropy.fused import linear_cross_entropy
    from kernels.prism.chunk import prism_scan
    from kernels.prism.step import prism_step
    from kernels.short_conv.fused import short_conv
    from kernels.swiglu.fused import swiglu
    from kernels.unit_keys.fused import unit_keys
    from prism_lm.model.attention import causal_attention

    return Operators(
        scan=prism_scan,
        step=prism_step,
        short_conv=short_conv,
        attention=causal_attention,
        gated_rms_norm=gated_rms_norm,
        unit_keys=unit_keys,
        swiglu=swiglu,
        add_rms_norm=add_rms_norm,
        linear_cross_entropy=linear_cross_entropy,
    )


def kernel_choices() -> tuple[str, ...]:
    """What a user may ask for."""
    return get_args(Kernels)


def choose_kernels(kernels: Kernels, device_type: str, *, key: str = "parallel.kernels") -> Literal["triton", "plain"]:
    """What `auto` means on a device of that type ("cuda", "cpu"). Raises ValueError for Triton off the GPU."""
    if kernels == "triton" and device_type != "cuda":
        raise ValueError(
            f"{key}=triton must run on a CUDA device, and torch sees none; use {key}=plain, or auto, which chooses"
        )
    if kernels == "auto":
        return "triton" if device_type == "cuda" else "plain"
    return kernels


def select_operators(device_type: str, kernels: Kernels = "auto", *, key: str = "parallel.kernels") -> Operators:
    """The operators for a device of that type. Raises ValueError for Triton off the GPU."""
    chosen = choose_kernels(kernels, device_type, key=key)
    return build_triton_operators() if chosen == "triton" else build_plain_operators()
