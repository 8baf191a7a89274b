"""The cases of the scan's GPU tests, and a way to compile their kernels in many processes before the tests begin.

    python -m tests.kernels.prism.gpu_cases SHARE OF FOLDER      runs every OF-th case from SHARE on, as a child

Triton compiles a kernel for each combination of widths, written pairs and dtype, a second or more at a time; its cache
on disk is what these processes fill and what the tests then read.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernels.prism import launch
from kernels.prism.chunk import prism_scan
from tests.kernels.prism.cases import Case, build_case

ROOT = Path(__file__).parents[3]
MAX_PROCESSES, WAIT_S = 12, 240.0


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A case: its arguments to `build_case`, its dtype, and how the scan is called."""

    dtype: torch.dtype = torch.bfloat16
    L: int = 2
    T: int = 150
    K: int = 128
    V: int = 128
    B: int = 2
    H: int = 2
    decay: float | str = -0.1
    packed: bool = True
    cosine: float = 0.0
    as_model: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def build(self) -> Case:
        """On the GPU, in the spec's dtype."""
        sizes = {"B": self.B, "H": self.H, "K": self.K, "V": self.V}
        kind = {"decay": self.decay, "packed": self.packed, "cosine": self.cosine}
        case = build_case(self.L, self.T, **sizes, **kind).cast(torch.float64, "cuda")
        return case.cast_as_model(self.dtype) if self.as_model else case.cast(self.dtype)

    def name(self) -> str:
        """What differs from the default, for a test's id."""
        differs = [f"{key}={getattr(self, key)}" for key in self.__dataclass_fields__ if key != "options"]
        default = Spec()
        kept = [text for text in differs if text != f"{text.split('=')[0]}={getattr(default, text.split('=')[0])}"]
        return "-".join([*kept, *(f"{key}={value}" for key, value in self.options.items())]) or "default"


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = [Spec(T=T) for T in (1, 63, 64, 65, 500, 4096)]
RANKS = [Spec(L=L, K=K, V=K, as_model=as_model) for L in range(5) for K, as_model in ((128, False), (64, True))]
DECAYS = [Spec(decay=decay) for decay in (0.0, "strong", "mixed", "vanishing")]
DTYPES = [Spec(dtype=dtype, K=K, V=K) for dtype in (FP16, FP32) for K in (64, 128)]
HIGH_RANKS = [Spec(dtype=FP16, L=4), Spec(dtype=FP32, L=4, K=64, V=64), Spec(dtype=FP32, L=0, K=64, V=64)]
FP32_LENGTHS = [Spec(dtype=FP32, K=64, V=64, T=T) for T in (1, 31, 32, 33, 500)]
FP32_DECAYS = [Spec(dtype=FP32, K=64, V=64, decay=decay) for decay in ("strong", "mixed")]
WIDTHS = [
    Spec(K=K, V=V)
    for K, V in ((16, 16), (48, 64), (64, 48), (64, 128), (128, 64), (16, 256), (256, 16), (256, 256), (80, 144))
]
WIDE_FP32 = [Spec(dtype=FP32, K=256, V=256, T=70)]
CORRELATED = [Spec(cosine=0.5, decay=-0.05, dtype=dtype) for dtype in (BF16, FP16, FP32)]
OTHERS = [
    Spec(packed=False),
    Spec(options={"activation": "identity"}),
    Spec(options={"chunk_tokens": 16}),
    Spec(options={"chunk_tokens": 32}),
]
HELD = [
    *LENGTHS, *RANKS, *DECAYS, *DTYPES, *HIGH_RANKS, *FP32_LENGTHS, *FP32_DECAYS, *WIDTHS, *WIDE_FP32, *CORRELATED,
    *OTHERS,
]  # fmt: skip
# Every setting of a kernel's launch, on each of these.
LAUNCHED = [Spec(), Spec(K=64, V=64), Spec(L=4), Spec(L=1)]
# Kernels of the tests that build inputs of their own.
LONG = Spec(T=65_536, B=1, decay=-0.01)
HUGE = Spec(L=1, T=192, B=1, H=16, packed=False, as_model=True)
MANY_HEADS = Spec(L=1, T=16, B=70, H=1000, K=16, V=16)


def list_launches() -> list[tuple[str, launch.Launch]]:
    """Every kernel with each setting that its table holds."""
    return [(kernel, setting) for kernel, choice in launch.LAUNCHES.items() for setting in dict.fromkeys(choice)]


def compile_ahead() -> None:
    """Run every case once, in as many processes as the machine has cores for; their errors are left to the tests."""
    num_processes = max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) - 2))
    with tempfile.TemporaryDirectory() as folder:
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.kernels.prism.gpu_cases", str(share), str(num_processes), folder],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for share in range(num_processes)
        ]
        end_s = time.monotonic() + WAIT_S
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end_s - time.monotonic()))
            child.kill()


def _list_distinct() -> Iterator[Spec]:
    """One case for each set of kernels, which lengths and numbers of heads do not change."""
    seen = set()
    for spec in (*HELD, *LAUNCHED, HUGE, MANY_HEADS):
        key = (spec.dtype, spec.L, spec.K, spec.V, spec.packed, spec.as_model, str(spec.options))
        if key not in seen:
            seen.add(key)
            yield spec


def _run_share(share: int, num_processes: int, folder: Path) -> None:
    """This child's cases, then, once all children are that far, its launches, whose other kernels then exist."""
    for spec in list(_list_distinct())[share::num_processes]:
        _run_quietly(spec)
    (folder / str(share)).touch()
    end_s = time.monotonic() + WAIT_S
    while len(list(folder.iterdir())) < num_processes and time.monotonic() < end_s:
        time.sleep(0.1)
    for spec, (kernel, setting) in [(s, one) for s in LAUNCHED for one in list_launches()][share::num_processes]:
        with launch.override(kernel, setting):
            _run_quietly(spec)


def _run_quietly(spec: Spec) -> None:
    with contextlib.suppress(Exception):
        spec.build().run(prism_scan, **spec.options)


if __name__ == "__main__":
    _run_share(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
