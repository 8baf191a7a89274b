"""Argument errors say what is wrong, what it must be, and what to do."""

import pytest
import torch

from kernels.checks import (
    check_at_least,
    check_dtype,
    check_float,
    check_num_dims,
    check_one_of,
    check_shape,
    compute_dtype_of,
)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: check_shape("x_BT", torch.ones(2, 3), "(B, T)", (2, 4)), r"x_BT.shape=\(2, 3\) must equal \(B, T\)="),
        (lambda: check_num_dims("x_BT", torch.ones(2), "BT"), r"x_BT.shape=\(2,\) must have 2 dims \(B, T\); reshape"),
        (lambda: check_float("x", torch.ones(2).int()), "x.dtype=torch.int32 must be one of .*; cast it"),
        (lambda: check_dtype("x", torch.ones(2), torch.bool), "x.dtype=torch.float32 must equal torch.bool; cast it"),
        (lambda: check_at_least("chunk_tokens", 0, 1), "chunk_tokens=0 must be at least 1; raise it"),
        (lambda: check_one_of("activation", "relu", ("gelu",)), r"activation='relu' must be one of \('gelu',\)"),
    ],
)
def test_error_names_value_and_rule(check, message):
    with pytest.raises(ValueError, match=message):
        check()


def test_every_dtype_but_fp64_is_computed_in_fp32():
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    computed = [compute_dtype_of(torch.ones(1, dtype=dtype)) for dtype in dtypes]
    assert computed == [torch.float32, torch.float32, torch.float32, torch.float64]
