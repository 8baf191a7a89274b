"""One decode token continues what a scan began."""

import pytest
import torch

from kernels.prism.chunk_reference import prism_scan_chunked
from kernels.prism.step_reference import prism_step_reference
from tests.kernels.compare import assert_relative_error_below
from tests.kernels.prism.cases import build_case


@pytest.mark.parametrize("L", [0, 1, 2, 4])
def test_steps_after_prefill_equal_full_forward(L):
    tensors = build_case(L, 40, packed=False).tensors
    whole, whole_state = prism_scan_chunked(*tensors)
    _, state = prism_scan_chunked(*[None if x is None else x[:, :33] for x in tensors])
    outputs = []
    for t in range(33, 40):
        out, state = prism_step_reference(*[None if x is None else x[:, t] for x in tensors], state_BHVK=state)
        outputs.append(out)
    assert_relative_error_below(1e-10, out=(torch.stack(outputs, 1), whole[:, 33:]), state=(state, whole_state))


def test_bf16_step_keeps_its_state_in_fp32():
    token = [x[:, 0] for x in build_case(2, 1).cast(torch.bfloat16).tensors]
    out, state = prism_step_reference(*token, state_BHVK=torch.zeros(2, 2, 5, 6))
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32


def test_state_of_another_size_is_refused():
    token = [x[:, 0] for x in build_case(2, 1).tensors]
    with pytest.raises(ValueError, match=r"entry_state_BHVK.shape=\(2, 2, 6, 5\) must equal \(B, H, V, K\)"):
        prism_step_reference(*token, state_BHVK=torch.zeros(2, 2, 6, 5))
