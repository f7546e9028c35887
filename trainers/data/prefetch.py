"""Prefetches the batches of the next steps while the current step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
STEPS_AHEAD = 2  # number of steps that are fetched ahead: one is ready, and the next one is being fetched


def prefetch_results(fetch_functions: Iterable[Callable[[], T]], most_ahead: int = STEPS_AHEAD) -> Generator[T, None, None]:
    """Call functions in a thread and yield their results in order.

    The thread calls up to `most_ahead` functions before their results are requested. If a function raises an error, the error
    is raised when its result is requested. The thread starts when the first result is requested.
    """
    futures: deque[Future[T]] = deque()
    fetch_thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        fetch_iterator = iter(fetch_functions)
        for fetch in fetch_iterator:
            futures.append(fetch_thread.submit(fetch))
            if len(futures) > most_ahead:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        fetch_thread.shutdown(cancel_futures=True)
