"""Starts a command as a process, so that Ctrl-C and SIGTERM end it with one sentence at any moment, also while it imports.

Before its handler is in place this module imports `signal` alone: typing and importlib would take longer than all of it.
"""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130
EARLY = "interrupted before anything was changed."

try:
    import signal
except KeyboardInterrupt:
    os.write(2, f"{EARLY}\n".encode())
    os._exit(INTERRUPTED)

MYPY = False  # as typing.TYPE_CHECKING, without the import
if MYPY:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start(package: str) -> int:
    """Import the command of a package, run it, and return its exit code. A signal that is ignored stays ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell has what it puts in the background ignore Ctrl-C
            signal.signal(number, _handle)
    __import__(f"{package}.cli")
    code: int = sys.modules[f"{package}.cli"].main()
    on_signal(lambda: os._exit(code))  # all is done and said; only the interpreter's own end is left
    return code


def on_signal(act: Callable[[], object]) -> None:
    """From now on a signal calls `act`, in the main thread. Without effect where `start` did not start this process."""
    global _act
    _act = act


def raise_on_signal() -> None:
    """From now on a signal raises KeyboardInterrupt, in the main thread."""
    on_signal(_raise)


def leave(sentence: str) -> NoReturn:
    """End this process at once with a sentence on standard error; threads are not waited for."""
    os.write(2, f"{sentence}\n".encode())
    os._exit(INTERRUPTED)


def _leave_early() -> NoReturn:
    leave(EARLY)


def _handle(number: int, frame: FrameType | None) -> None:
    _act()


def _raise() -> NoReturn:
    raise KeyboardInterrupt


_act: Callable[[], object] = _leave_early
