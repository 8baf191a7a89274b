"""Argument errors of every operator, in one wording: `name.property=value must RULE; remedy`.

All checks read metadata only, so they cost nothing on a GPU and vanish under torch.compile.
"""

import torch

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_shape(name: str, tensor: torch.Tensor, dims: str, sizes: tuple[int, ...]) -> None:
    """Raise ValueError unless `tensor` has exactly `sizes`; `dims` spells them, e.g. "(B, T, H, K)"."""
    if tuple(tensor.shape) != sizes:
        raise ValueError(f"{name}.shape={tuple(tensor.shape)} must equal {dims}={sizes}; transpose or slice it")


def check_num_dims(name: str, tensor: torch.Tensor, dims: str) -> None:
    """Raise ValueError unless `tensor` has as many dims as `dims` has letters, e.g. "BTHK"."""
    if tensor.dim() != len(dims):
        spelled = ", ".join(dims)
        raise ValueError(f"{name}.shape={tuple(tensor.shape)} must have {len(dims)} dims ({spelled}); reshape it")


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless `tensor` is fp16, bf16, fp32 or fp64."""
    if tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name}.dtype={tensor.dtype} must be one of {FLOAT_DTYPES}; cast it")


def check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless `tensor` has `dtype`."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name}.dtype={tensor.dtype} must equal {dtype}; cast it")


def check_at_least(name: str, value: int, minimum: int) -> None:
    """Raise ValueError unless `value >= minimum`."""
    if value < minimum:
        raise ValueError(f"{name}={value} must be at least {minimum}; raise it")


def check_at_most(name: str, value: int, maximum: int) -> None:
    """Raise ValueError unless `value <= maximum`."""
    if value > maximum:
        raise ValueError(f"{name}={value} must be at most {maximum}; lower it")


def check_no_fp64(name: str, tensor: torch.Tensor, plain: str) -> None:
    """Raise ValueError if `tensor` is fp64, which no kernel takes; `plain` names the form that does."""
    if tensor.dtype == torch.float64:
        raise ValueError(f"{name}.dtype={tensor.dtype} must be at most 32 bits wide; cast it, or call {plain}")


def check_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {choices}; pick one")


def compute_dtype_of(tensor: torch.Tensor) -> torch.dtype:
    """The dtype an operator computes in: fp64 for fp64 inputs, fp32 for every other float."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def narrow(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype`, for what an autograd.Function's forward returns.

    torch 2.11's compiler loses the gradient of a result that comes from an in-place operation or from a `.to` that
    changes nothing.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


@torch.compiler.assume_constant_result
def is_interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1, set before a kernel's module is imported)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def check_on_gpu(operator: str, plain: str, tensors: dict[str, torch.Tensor | None]) -> None:
    """Raise ValueError unless every given tensor is on one CUDA device; on the CPU only Triton's interpreter runs
    kernels. `plain` names the form of `operator` that runs anywhere."""
    first = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        first = tensor.device if first is None else first
        if tensor.device != first or not (tensor.is_cuda or is_interpreted()):
            raise ValueError(
                f"{name}.device={tensor.device} must be the CUDA device of all of {operator}'s tensors; "
                f"move it, or call {plain}, which runs anywhere"
            )


def check_multiple(name: str, value: int, multiple: int, maximum: int) -> None:
    """Raise ValueError unless `value` is a multiple of `multiple`, from there to `maximum`."""
    if value % multiple or not 0 < value <= maximum:
        raise ValueError(f"{name}={value} must be a multiple of {multiple} from {multiple} to {maximum}; pad it")
