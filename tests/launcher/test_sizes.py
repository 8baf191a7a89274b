import subprocess
import sys

import pytest

from launcher.sizes import main
from prism_lm.model.cost import count_parameters
from prism_lm.model.sizes import named_size, size_names


def test_table_has_a_line_for_every_size(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : lines.index("")]] == size_names()


def test_one_size_prints_its_yaml_and_the_built_models_count(capsys):
    assert main(["350m-gated_delta", "--row-tokens", "4096"]) == 0
    printed = capsys.readouterr().out
    assert "  mixer: gated_delta\n" in printed and "rows of 4,096 tokens" in printed
    assert printed.splitlines()[-1].split() == ["total", f"{count_parameters(named_size('350m-gated_delta')):,}"]


def test_unknown_size_is_an_error_of_the_users():
    with pytest.raises(ValueError, match=r"^size=9b must be a named size"):
        main(["9b"])


def test_table_needs_no_torch():
    code = "import sys; from launcher.sizes import main; main([]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
