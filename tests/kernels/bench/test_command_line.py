"""`python -m kernels.bench` for someone with a terminal and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.bench.__main__ import OPERATORS, build_parser, main

ROOT = Path(__file__).parent.parent.parent.parent


def test_help_loads_no_torch_and_has_an_example_that_parses():
    code = "import sys, kernels.bench.__main__ as m; m.build_parser().print_help(); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    example = shown.rsplit("python -m kernels.bench", 1)[1].split()
    parsed = build_parser().parse_args(example)
    assert parsed.shape == [(1, 32768, 16)] and parsed.solver_steps == [1, 2]
    assert all(operator in shown for operator in OPERATORS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_without_a_gpu_the_run_ends_with_one_line_and_code_2(capsys):
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: kernels.bench needs a CUDA device") and len(shown.err.splitlines()) == 1
    assert shown.out == ""


@pytest.mark.parametrize("shape", ["1x2", "axbxc", "0x16x2", "1x2x3x4"])
def test_shape_that_is_none_is_refused_by_name(shape, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--shape", shape])
    assert repr(shape) in capsys.readouterr().err
