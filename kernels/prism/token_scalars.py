"""Step sizes and log decays of one token from their logits, for decoding: one kernel for up to nine of plain torch.

    step size   sigmoid(x)
    log decay   -exp(A_log) softplus(x + dt_bias), or log sigmoid(x); at least min_log_decay

All in fp32. log1p(y) is log(u) y / (u - 1) with u = 1 + y, whose roundings cancel, and y where u is 1.
Dims: B batch, C logits of a row, H heads.
"""

import torch
import triton
import triton.language as tl

from kernels import allocate
from kernels.checks import check_no_fp64, check_on_gpu

BLOCK = 128
SIZE, GATED, SIGMOID = 0, 1, 2
LINEAR_ABOVE = 20.0
"Where softplus is its argument, as in torch."


@triton.jit
def log1p_exp(b_x):
    """log(1 + e^x), for x of at most 20."""
    b_exp = tl.exp(b_x)
    b_sum = 1.0 + b_exp
    b_less = b_sum - 1.0
    return tl.where(b_less == 0.0, b_exp, tl.log(b_sum) * (b_exp / tl.where(b_less == 0.0, 1.0, b_less)))


@triton.jit
def scalars_kernel(
    p_logit, p_rate_log, p_bias, p_out, stride, num_scalars, min_log_decay,
    C: tl.constexpr, KIND: tl.constexpr, LINEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One scalar a lane; row o // C, head o % C."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < num_scalars
    o_c = o % C
    b_x = tl.load(p_logit + (o // C).to(tl.int64) * stride + o_c, mask=m, other=0.0).to(tl.float32)
    if KIND == 0:
        b_out = tl.sigmoid(b_x)
    else:
        if KIND == 1:
            b_x += tl.load(p_bias + o_c, mask=m, other=0.0).to(tl.float32)
            b_rate = tl.exp(tl.load(p_rate_log + o_c, mask=m, other=0.0).to(tl.float32))
            b_out = -b_rate * tl.where(b_x > LINEAR, b_x, log1p_exp(tl.where(b_x > LINEAR, LINEAR, b_x)))
        else:
            b_out = tl.where(b_x < 0.0, b_x, 0.0) - log1p_exp(-tl.abs(b_x))
        b_out = tl.where(b_out < min_log_decay, min_log_decay, b_out)
    tl.store(p_out + o, b_out, mask=m)


def step_sizes_token(logit_BTC: torch.Tensor) -> torch.Tensor:
    """sigmoid of (B, 1, C) logits, in fp32."""
    return _launch(SIZE, logit_BTC, None, None, 0.0)


def gated_log_decay_token(
    logit_BTH: torch.Tensor, A_log_H: torch.Tensor, dt_bias_H: torch.Tensor, *, min_log_decay: float
) -> torch.Tensor:
    """Log decays (B, 1, H) of Gated DeltaNet, in fp32."""
    return _launch(GATED, logit_BTH, A_log_H, dt_bias_H, min_log_decay)


def sigmoid_log_decay_token(logit_BTH: torch.Tensor, *, min_log_decay: float) -> torch.Tensor:
    """Log decays (B, 1, H), log sigmoid of the logits, in fp32."""
    return _launch(SIGMOID, logit_BTH, None, None, min_log_decay)


def _launch(
    kind: int,
    logit_BTC: torch.Tensor,
    A_log_H: torch.Tensor | None,
    dt_bias_H: torch.Tensor | None,
    min_log_decay: float,
) -> torch.Tensor:
    check_on_gpu("token scalars", "the layer", {"logit_BTC": logit_BTC, "A_log_H": A_log_H, "dt_bias_H": dt_bias_H})
    check_no_fp64("logit_BTC", logit_BTC, "the layer")
    B, T, C = logit_BTC.shape
    if T != 1 or logit_BTC.stride(2) != 1:
        raise ValueError(f"logit_BTC.shape={tuple(logit_BTC.shape)} must be (B, 1, C), C side by side; call the layer")
    out_BTC = allocate.allocate(B, 1, C, like=logit_BTC, dtype=torch.float32)
    scalars_kernel[(triton.cdiv(B * C, BLOCK),)](
        logit_BTC, A_log_H, dt_bias_H, out_BTC, logit_BTC.stride(0), B * C, min_log_decay,
        C=C, KIND=kind, LINEAR=LINEAR_ABOVE, BLOCK=BLOCK, num_warps=BLOCK // 32,
    )  # fmt: skip
    return out_BTC
