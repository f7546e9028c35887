"""The lock of a node, in /tmp: while a run of one user holds it, no run of this or another user starts on this node.

All users of a machine lock the same file, so another user can let the runs of this user wait, as with every use of the node.
`find_lock_holder` says who this is. A file that this user cannot lock at all, because another user made it so, is not waited
for: the lock is then a file of this user's own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from shardlab.errors import WorkspaceError
from shardlab.files import files, own_folder

LOCK_FOLDER = Path("/tmp")
LONGEST_COMMAND = 200  # characters of a command line that a message shows


@contextlib.contextmanager
def hold_lock(lock_kind: str, host: str, handle_busy: Callable[[int], object]) -> Iterator[int]:
    """Hold the lock of a node during the block; yield the descriptor of the lock file.

    lock_kind: `node` on the machine that starts runs, `run` on the node itself. host: the address of the node. handle_busy: as
    in `files.hold_lock`. Raises WorkspaceError, and what `handle_busy` raises.
    """
    lock_name = f"shardlab-{lock_kind}-{host.replace(':', '_')}.lock"
    with contextlib.ExitStack() as exit_stack:
        try:
            lock_descriptor = exit_stack.enter_context(files.hold_lock(LOCK_FOLDER / lock_name, handle_busy))
        except WorkspaceError:
            own_lock_folder = own_folder.make_own_folder(LOCK_FOLDER, f"shardlab-locks-{os.geteuid()}")
            lock_descriptor = exit_stack.enter_context(files.hold_lock(own_lock_folder / lock_name, handle_busy))
        with contextlib.suppress(PermissionError):  # another user owns the lock file
            os.fchmod(lock_descriptor, 0o644)  # whatever the umask, other users may lock the file, and may not write to it
            os.utime(lock_descriptor)  # keep the lock file new: systemd removes old files from /tmp
        yield lock_descriptor


def find_lock_holder(lock_descriptor: int) -> tuple[int, str]:
    """Who holds a lock_descriptor: (the id of the user, a phrase such as `process 12 of the user bob (python -m jobs ...)`).

    lock_descriptor: the descriptor of the lock file.
    """
    import psutil

    lock_status = os.fstat(lock_descriptor)
    for line in files.read("/proc/locks").decode().splitlines():
        # a line of a process that waits for a lock has `->` as its kind
        _, kind, _, _, process_id, locked_file, *_ = line.split()
        if kind == "FLOCK" and locked_file.endswith(f":{lock_status.st_ino}"):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(int(process_id))
                command_line = " ".join(process.cmdline())[:LONGEST_COMMAND]
                return process.uids().effective, f"process {process_id} of the user {process.username()} ({command_line})"
    return (
        lock_status.st_uid,
        f"a process that has ended or is hidden; the lock file belongs to the user id {lock_status.st_uid}",
    )
