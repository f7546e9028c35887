"""Starts a command so that Ctrl-C and SIGTERM end it with one sentence at any time, even while it imports modules.

Until the signal handlers are set, this module imports only gc, os, sys and `signal`. Importing typing or importlib would take
longer than everything else before that moment.
"""

from __future__ import annotations

import gc
import os
import sys

WRONG_INPUT = 2  # exit code of a command that changed nothing
INTERRUPTED_CODE = 130  # exit code of an interrupted command: 128 + SIGINT
INTERRUPTED_EARLY = "interrupted before anything was changed."

try:
    import signal
except KeyboardInterrupt:
    os.write(2, f"{INTERRUPTED_EARLY}\n".encode())
    os._exit(INTERRUPTED_CODE)

MYPY = False  # mypy treats a variable of this name as true; typing.TYPE_CHECKING, which does the same, would need an import
if MYPY:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

INTERRUPT_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start_command(package_name: str) -> int:
    """Import the module PACKAGE.cli, run its `main`, and return the exit code. A signal that is already ignored stays ignored.

    package_name: jobs, provision, collect or shardlab. If a package of shardlab is not our own, say what hides it, and return
    2.
    """
    for stream_name in ("stdout", "stderr"):
        if getattr(sys, stream_name) is None:  # the user closed it, e.g. by 2>&-
            setattr(sys, stream_name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - pathlib is not imported yet
    for signal_number in INTERRUPT_SIGNALS:
        if signal.getsignal(signal_number) is not signal.SIG_IGN:  # SIGINT is ignored in a background command
            signal.signal(signal_number, _handle_signal)
    gc.disable()  # modules make many objects that live until the end, and searching them takes 5 ms of each start
    from shardlab import package_origin

    if (shadow_sentence := package_origin.explain_shadowed_package()) is not None:
        return _print_refusal(shadow_sentence)
    try:
        __import__(f"{package_name}.cli")
    except (ImportError, SyntaxError):
        if (overwrite_sentence := package_origin.explain_overwritten_package()) is not None:
            return _print_refusal(overwrite_sentence)
        raise
    gc.freeze()
    gc.enable()
    exit_code: int = sys.modules[f"{package_name}.cli"].main()
    set_signal_action(lambda: os._exit(exit_code))  # the command is finished: a signal may end this process at once
    return exit_code


def _make_entry_point(package_name: str) -> Callable[[], int]:
    return lambda: start_command(package_name)


# The four commands, for the entry points in pyproject.toml.
provision, jobs, collect, shardlab = map(_make_entry_point, ("provision", "jobs", "collect", "shardlab"))


def set_signal_action(action: Callable[[], object]) -> None:
    """From now on, each of INTERRUPT_SIGNALS calls `action` in the main thread. No effect if this process was not started by
    `start_command`."""
    global _signal_action
    _signal_action = action


def raise_on_signal() -> None:
    """From now on, each of INTERRUPT_SIGNALS raises KeyboardInterrupt in the main thread."""
    set_signal_action(_raise_interrupt)


def exit_now(sentence: str) -> NoReturn:
    """Print a sentence on standard error and end this process at once, without waiting for threads."""
    os.write(2, f"{sentence}\n".encode())
    os._exit(INTERRUPTED_CODE)


def _print_refusal(sentence: str) -> int:
    """Print an error, and return the exit code of a command that changed nothing. Imports nothing that may be missing."""
    printable_sentence = "".join(character if character.isprintable() else "?" for character in sentence)
    os.write(2, f"error: {printable_sentence}\n".encode(errors="backslashreplace"))
    return WRONG_INPUT


def _exit_early() -> NoReturn:
    exit_now(INTERRUPTED_EARLY)


def _handle_signal(signal_number: int, frame: FrameType | None) -> None:
    _signal_action()


def _raise_interrupt() -> NoReturn:
    raise KeyboardInterrupt


_signal_action: Callable[[], object] = _exit_early
