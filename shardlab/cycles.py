"""Records come by the million and none is part of a cycle: Python's search for those took a third of the time of reading."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def not_searched() -> Iterator[None]:
    """No search in the block; nor is what stays of it searched afterwards, which took a tenth of a report's time."""
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.freeze()
            gc.enable()
