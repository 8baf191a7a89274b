"""Python imports this at its start where the folder is on PYTHONPATH: the run raises as it tells of its first step."""

import builtins
from typing import Any

_print = builtins.print


def _print_and_raise(*values: Any, **options: Any) -> None:
    _print(*values, **options)
    if values and str(values[0]).startswith("step "):
        raise RuntimeError("planned fault")


builtins.print = _print_and_raise
