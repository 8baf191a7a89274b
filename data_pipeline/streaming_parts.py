"""Imports of single modules of mosaicml-streaming, without the packages' own `__init__`.

Those import every data set that the library ships, and with them transformers and scikit-learn: 7 of 10 CPU-seconds in
each process of a run, for nothing that is used here.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec

PACKAGES = ("streaming", "streaming.base")


@contextmanager
def importing_parts() -> Generator[None, None, None]:
    """In the block `from streaming.base.x import y` runs x and what x imports; packages that nobody has imported stand
    there empty, and are gone after it, so that a later `import streaming` is a whole one. Modules loaded here are then
    found by `from streaming.base.x import y`, not as attributes of the package."""
    bare = [name for name in PACKAGES if name not in sys.modules]
    try:
        for name in bare:
            spec = find_spec(name)
            if spec is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            sys.modules[name] = module_from_spec(spec)
        yield
    finally:
        for name in bare:
            sys.modules.pop(name, None)
