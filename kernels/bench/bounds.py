"""What the operators must move and multiply, and how fast the machine copies and multiplies.

Traffic of a scan's kernels (kernels/README.md), in bytes a token and head, with k = e K and v = e V the bytes of a key
and of a value (e bytes an element), t = e C of a row of a chunk's matrix, s = e K V / C of a token's share of a stored
state, and M = max(L, 1). Each kernel reads what it needs once and writes what it makes once; float32 scalars, below 2%
at the sizes below, are left out, and with them `collect`:

    solve        (M + 1) k + M t                          keys; T, w, F_l
    write        (M + L + 1) v + M t                      r_1, p_l, T, F_l; u, E_l
    state        (M + 1) (k + v) + s                      keys, w, u, E_l; S, V'
    output       (M + 1) (k + v) + s                      q, keys, V', E_l, S; o
    query grad   (M + 3) k + (M + 2) v + (2 M - 1) t + s  q, keys, V', E_l, S, dO; P^T dO, gamma q, dq, P'_l, scores
    state grad   3 k + 3 v + s                            gamma q, k, w, dO, P^T dO; dS, dV'
    erase grad   (M + 2) v + (M + 1) t                    T, V', E_l, dV'; lambda, X_l
    write grad   (M - 1) (k + v + 2 t), M >= 2: 2 v + s   K_l, F_l, scores, dO, dV', dS; dE_l
    solver grad  (M + 2 L + 2) v                          r_1, p_l, lambda, dE_l; dr_1, dp_l
    key grad     (2 M + 1) k + (M + 1) v + 2 M t + 2 s    q, keys, V', E_l, S, dS, lambda, X_l, P'_l; dK_l

At K = V = 128, C = 64 in bf16: 4608, 6656, 10752 forward and 9344, 14080, 21504 backward for L = 1, 2, 4. A bound of
these kernels, not of the recurrence: a plan that stores less was counted at 3348, 5396, 8468 and 7204, 8740, 11812.

Dims: B batch, T tokens, H heads, K key width, V value width, L solver steps, M written pairs, C tokens in a chunk.
"""

from dataclasses import dataclass

import torch
import triton

STATE_BYTES = 4
COPY_BYTES = 2**30
PRODUCT_WIDTH = 8192
# A device that is missing here has no bound: nobody has compared what it measures with what its maker says.
KNOWN_GPUS = ("H200",)


@dataclass(frozen=True, kw_only=True)
class ScanShape:
    """Sizes of a scan's inputs."""

    B: int
    T: int
    H: int
    L: int
    K: int = 128
    V: int = 128
    C: int = 64
    element_bytes: int = 2

    @property
    def M(self) -> int:
        return max(self.L, 1)

    @property
    def tokens(self) -> int:
        return self.B * self.T

    def __str__(self) -> str:
        return f"{self.B} x {self.T} H{self.H} L{self.L}"


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches in this run; `is_known` devices alone have bounds."""

    copy_bytes_per_s: float
    product_flops_per_s: float
    is_known: bool

    def compute_bound_ms(self, num_bytes: float, flops: float = 0.0) -> float | None:
        """The shortest time in which so many bytes move and so many operations run, or None."""
        if not self.is_known:
            return None
        return 1e3 * max(num_bytes / self.copy_bytes_per_s, flops / self.product_flops_per_s)


def count_forward_bytes(shape: ScanShape) -> float:
    """Traffic of a scan's forward kernels a token and head, in bytes."""
    k, v, t, s = _count_rows(shape)
    L, M = shape.L, shape.M
    solve = (M + 1) * k + M * t
    write = (M + L + 1) * v + M * t
    state = output = (M + 1) * (k + v) + s
    return solve + write + state + output


def count_backward_bytes(shape: ScanShape) -> float:
    """Traffic of a scan's backward kernels a token and head, in bytes."""
    k, v, t, s = _count_rows(shape)
    L, M = shape.L, shape.M
    query = (M + 3) * k + (M + 2) * v + (2 * M - 1) * t + s
    state = 3 * k + 3 * v + s
    erase = (M + 2) * v + (M + 1) * t
    write = (M - 1) * (k + v + 2 * t) + (2 * v + s if M > 1 else 0)
    solver = (M + 2 * L + 2) * v
    keys = (2 * M + 1) * k + (M + 1) * v + 2 * M * t + 2 * s
    return query + state + erase + write + solver + keys


def _count_rows(shape: ScanShape) -> tuple[float, float, float, float]:
    e = shape.element_bytes
    return e * shape.K, e * shape.V, e * shape.C, e * shape.K * shape.V / shape.C


def count_forward_flops(shape: ScanShape) -> float:
    """Matrix products of a scan's forward kernels a token and head; the inverse as a triangular one."""
    K, V, C, M = shape.K, shape.V, shape.C, shape.M
    solve = (M + 1) * 2 * C * K + 2 * C * C / 3 + (M - 1) * 2 * C * C
    write = M * 2 * C * V
    state = (M + 1) * 2 * K * V
    output = 2 * K * V + M * (2 * C * K + 2 * C * V)
    return solve + write + state + output


def count_backward_flops(shape: ScanShape) -> float:
    """Matrix products of a scan's backward kernels a token and head, none recomputed but the scores."""
    K, V, C, M = shape.K, shape.V, shape.C, shape.M
    first = 5 * 2 * C * K + 4 * 2 * C * V + 6 * 2 * K * V
    each_more = 5 * 2 * C * K + 4 * 2 * C * V + 2 * 2 * K * V
    return first + (M - 1) * each_more


def count_step_bytes(B: int, H: int, K: int, V: int, M: int, element_bytes: int = 2) -> int:
    """Traffic of a decode step: the state in fp32 read and written, the token's vectors and scalars, its output."""
    vectors = (1 + M) * K + (1 + M) * V + V
    return B * H * (2 * STATE_BYTES * K * V + element_bytes * vectors + STATE_BYTES * (M + 1))


def measure_ceilings(name: str) -> Ceilings:
    """Copy bandwidth (bytes read and written) and bf16 matrix product of this device, measured now."""
    copy_ms, product_ms = _time_copy(), _time_product()
    is_known = any(known in name for known in KNOWN_GPUS)
    return Ceilings(2 * COPY_BYTES / copy_ms * 1e3, 2 * PRODUCT_WIDTH**3 / product_ms * 1e3, is_known)


def _time_copy() -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")


def _time_product() -> float:
    sizes = (2, PRODUCT_WIDTH, PRODUCT_WIDTH)
    left, right = torch.randn(sizes, device="cuda", dtype=torch.bfloat16)
    return triton.testing.do_bench(lambda: left @ right, return_mode="median")
