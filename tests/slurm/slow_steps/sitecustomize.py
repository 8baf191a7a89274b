"""Python imports this at its start where the folder is on PYTHONPATH: each step then takes half a second more."""

import builtins
import time
from typing import Any

_print = builtins.print


def _print_slowly(*values: Any, **options: Any) -> None:
    _print(*values, **options)
    if values and str(values[0]).startswith("step "):
        time.sleep(0.5)


builtins.print = _print_slowly
