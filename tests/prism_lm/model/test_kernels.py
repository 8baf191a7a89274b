"""Which kernels run: chosen by name, and by the device where the user leaves it open."""

import pytest

from prism_lm.model.kernels import build_triton_operators, choose_kernels, select_operators
from prism_lm.model.operators import build_plain_operators


def test_auto_means_triton_on_cuda_and_plain_elsewhere():
    assert choose_kernels("auto", "cuda") == choose_kernels("triton", "cuda") == "triton"
    assert choose_kernels("auto", "cpu") == choose_kernels("plain", "cuda") == "plain"
    assert select_operators("cpu") == build_plain_operators()
    assert select_operators("cuda") == build_triton_operators()


def test_triton_without_a_cuda_device_is_refused_with_the_key_typed():
    with pytest.raises(ValueError, match=r"--kernels=triton must run on a CUDA device.*use --kernels=plain"):
        select_operators("cpu", "triton", key="--kernels")
