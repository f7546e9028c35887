"""Locks, so that only one command works on a cluster. The kernel releases a lock however its holder ends."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from socket import gethostname
from typing import Annotated

import msgspec

from shardlab.errors import InputError
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS

HOLDER_WAIT_S = 1.0  # the most seconds to wait until a process that has just taken the lock has written its name into the file
LockText = Annotated[str, msgspec.Meta(max_length=4096)]


class Holder(msgspec.Struct, frozen=True):
    """The content of a lock file: the process that took the lock last."""

    pid: Annotated[int, msgspec.Meta(ge=1)]
    user: LockText
    host: LockText
    since: LockText
    """When it took the lock, in local time with zone."""
    command: LockText
    created: float | None = None
    """When the process began, in seconds since the epoch; a PID alone can be reused."""


@contextlib.contextmanager
def hold_locks(lock_paths: Sequence[tuple[Path, str]], command_words: Sequence[str]) -> Iterator[None]:
    """Hold several locks during the block.

    lock_paths: pairs of a lock file and what the lock protects, such as `the cluster lab`, for the error message.
    command_words: the words of this command, which the lock file shows to other commands.

    Raises InputError at once if another process holds one of the locks, and WorkspaceError if a lock file cannot be opened.
    """
    with contextlib.ExitStack() as held_locks:
        for lock_path, protected_thing in lock_paths:
            descriptor = held_locks.enter_context(files.hold_lock(lock_path, functools.partial(_raise_locked, protected_thing)))
            _write_holder(descriptor, command_words)
        yield


def _raise_locked(protected_thing: str, descriptor: int) -> None:
    raise InputError(f"{protected_thing} {_describe_holder(descriptor)}; wait until it has ended. Nothing was changed.")


def _write_holder(descriptor: int, argv: Sequence[str]) -> None:
    import psutil  # not imported at the top, so that `--help` and a wrong command line do not wait for this import

    start_text, process_start_s = time.strftime("%Y-%m-%d %H:%M:%S %z"), psutil.Process().create_time()
    holder = Holder(os.getpid(), _find_user(os.geteuid()), gethostname(), start_text, shlex.join(argv)[:4096], process_start_s)
    with contextlib.suppress(OSError):  # a full disk, or another user's file: the lock works without the holder's name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, msgspec.json.encode(holder), 0)


def _describe_holder(descriptor: int) -> str:
    """A phrase for the error message that says who holds the lock, as far as the lock file tells."""
    deadline = time.monotonic() + HOLDER_WAIT_S
    while True:
        with contextlib.suppress(OSError, *DECODE_FAULTS):
            holder = msgspec.json.decode(os.pread(descriptor, 1 << 16, 0), type=Holder)
            if holder.host != gethostname() or _is_holder_alive(holder):
                return (
                    f"is locked by process {holder.pid} of the user {holder.user} on {holder.host} since "
                    f"{holder.since}, with the command: {holder.command}"
                )
        if time.monotonic() > deadline:
            return "is locked by another process, which the lock file does not name"
        time.sleep(0.02)


def _is_holder_alive(holder: Holder) -> bool:
    """Whether the process that the lock file names still runs.

    A process that was killed leaves its name in the file until the next holder writes its own name. If the process with this
    PID began at another time than `holder`, it is another process, to which the kernel gave the same PID.
    """
    import psutil

    try:
        process_start_s = psutil.Process(holder.pid).create_time()
    except psutil.AccessDenied:
        return True
    except (psutil.NoSuchProcess, OverflowError):
        return False
    return holder.created is None or abs(process_start_s - holder.created) < 1.0


def _find_user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
