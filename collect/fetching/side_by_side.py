"""Does the same work for several runs at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_in_threads(handle_item: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Call `handle_item` with each item, in one thread per core. Yields the results in the order of the items.

    Threads help because reading files and hashing release the GIL. A single item needs no thread.
    """
    if len(items) < 2:
        yield from map(handle_item, items)
        return
    from concurrent.futures import ThreadPoolExecutor  # imported only here: this import takes longer than a small transfer

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        yield from pool.map(handle_item, items)
