"""Prefetches the batches of the next steps while the current step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
AHEAD = 2  # steps: one that is being fetched while one lies ready


def prefetched(steps: Iterable[Callable[[], T]], ahead: int = AHEAD) -> Generator[T, None, None]:
    """The results of `steps`, in order. A thread calls up to `ahead` of them before their results are requested.

    An error of a call is raised when its result is requested. The first calls begin with the first `next`.
    """
    waiting: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        coming = iter(steps)
        for fetch in coming:
            waiting.append(pool.submit(fetch))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
