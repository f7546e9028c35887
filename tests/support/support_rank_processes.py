"""Forks processes that each do the work of a rank."""

import os
import sys
from collections.abc import Callable


def fork_ranks(world: int, work: Callable[[int], None]) -> None:
    """Call `work` with the number of each rank in a process of its own, and exit with 1 if one of them failed."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(rank)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))
