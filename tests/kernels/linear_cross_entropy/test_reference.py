"""The definition on a case computed by hand."""

import math

import pytest
import torch

from kernels.linear_cross_entropy.reference import linear_cross_entropy_reference


def test_equal_logits_cost_the_logarithm_of_the_vocabulary():
    hidden, weight = torch.zeros(3, 4), torch.ones(10, 4)
    labels = torch.tensor([1, -100, 9])
    assert linear_cross_entropy_reference(hidden, weight, labels).item() == pytest.approx(2 * math.log(10))
    rows = linear_cross_entropy_reference(hidden, weight, labels, reduction="none")
    assert rows.tolist() == pytest.approx([math.log(10), 0.0, math.log(10)])


@pytest.mark.parametrize(
    ("weight", "labels", "message"),
    [
        (torch.ones(10, 5), torch.zeros(3).long(), r"weight_VD.shape=\(10, 5\) must equal \(V, D\)=\(10, 4\)"),
        (torch.ones(10, 4).double(), torch.zeros(3).long(), "weight_VD.dtype=torch.float64 must equal torch.float32"),
        (torch.ones(10, 4), torch.zeros(3), "labels_N.dtype=torch.float32 must equal torch.int64"),
    ],
)
def test_ill_fitting_argument_is_refused_by_name(weight, labels, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy_reference(torch.ones(3, 4), weight, labels)
