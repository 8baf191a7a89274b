"""Where there is no GPU, Triton interprets kernels on the CPU; it reads this as a kernel's module is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
