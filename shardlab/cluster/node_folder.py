"""A folder on a node's own disk that the processes of a run on this node share, for example for a copy of the data set.

The first process fills the folder, and the last process removes the folder.

Every process that uses the folder holds a shared lock (flock); the process that fills or removes the folder holds an exclusive
lock. The kernel releases a lock when its process ends, even if the process is killed. A folder that a killed run left is
therefore not locked, and `remove_unused` removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import gethostname

from shardlab.files import files, own_folder

FILLED_MARK_NAME = ".filled"  # an empty file in the shared folder, written last: if it exists, the folder is completely filled
LOCK_SUFFIX = ".lock"  # suffix of the lock file beside the shared folder
PAUSE_S = 0.05  # seconds between two attempts to get a lock


def choose_parent_folder() -> tuple[Path, str]:
    """The folder on this node in which shared folders are made. Returns (the folder, a text that says why it was chosen).

    The folder is $TMPDIR, or /tmp if $TMPDIR is not set or is not a folder.
    """
    tmpdir = os.environ.get("TMPDIR", "")
    if tmpdir and Path(tmpdir).is_absolute() and Path(tmpdir).is_dir():
        return Path(tmpdir), "$TMPDIR"
    return Path("/tmp"), f"TMPDIR is {'not set' if not tmpdir else 'not a folder'}"


def make_shared_folder_name(run_path: Path) -> str:
    """The name of the shared folder for a run. run_path: the path of the run folder in the workspace.

    The name contains a digest of the path of the run folder, because two workspaces may each have a run with the same id.
    """
    return f"{run_path.name}-{hashlib.sha256(os.fsencode(run_path.resolve())).hexdigest()[:8]}"


@contextlib.contextmanager
def hold_shared_folder(folder_name: str, fill_folder: Callable[[Path], None]) -> Iterator[Path]:
    """Yield the folder `folder_name` on this node. The first process fills the folder; the other processes wait until it is
    filled.

    fill_folder: is called with the empty folder.

    The name on disk also contains this node's name, because $TMPDIR may be on a disk that nodes share. When the last process
    leaves the block, the folder is removed. Raises WorkspaceError, and every exception that `fill_folder` raises.
    """
    user_folder = _make_user_folder()
    with files.as_workspace_error("write"):
        shared_folder = user_folder / _make_name_on_node(folder_name)
        lock_descriptor = _lock_filled_folder(shared_folder, fill_folder)
    try:
        yield shared_folder
    finally:
        _release_folder(shared_folder, lock_descriptor)


def remove_unused() -> list[str]:
    """Remove this user's shared folders on this node that no process uses. They remain if the processes of a run are killed.

    Returns the names of the shared folders that processes still use. Raises WorkspaceError.
    """
    user_folder, names_in_use = _make_user_folder(), []
    with files.as_workspace_error("remove"):
        for lock_file in sorted(user_folder.glob(f"{_make_name_on_node('')}*{LOCK_SUFFIX}")):
            shared_folder = lock_file.with_name(lock_file.name.removesuffix(LOCK_SUFFIX))
            with contextlib.suppress(FileNotFoundError):  # another process has just removed the folder and its lock file
                lock_descriptor = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                if not _release_folder(shared_folder, lock_descriptor):
                    names_in_use.append(shared_folder.name.removeprefix(_make_name_on_node("")))
    return names_in_use


def _make_user_folder() -> Path:
    """The folder in which the shared folders of this user are made. Raises WorkspaceError.

    Only this user can open it, because all users of the node may share $TMPDIR.
    """
    with files.as_workspace_error("make"):
        return own_folder.make_own_folder(choose_parent_folder()[0], f"shardlab-data-{os.geteuid()}")


def _make_name_on_node(folder_name: str) -> str:
    return f"{gethostname()}-{folder_name}"


def _lock_filled_folder(folder: Path, fill_folder: Callable[[Path], None]) -> int:
    """Wait until another process has filled the folder, or fill it. fill_folder: called with the empty folder.

    Returns the descriptor of the lock file. This process holds a shared lock until it closes the descriptor.
    """
    while True:
        lock_descriptor = os.open(f"{folder}{LOCK_SUFFIX}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock_descriptor, fcntl.LOCK_SH)  # this call waits while another process fills the folder
        if _is_filled(folder, lock_descriptor):
            return lock_descriptor
        try:
            fcntl.flock(lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process holds a lock too, so try again
            os.close(lock_descriptor)
            time.sleep(PAUSE_S)
            continue
        try:
            if _is_current_lock_file(folder, lock_descriptor) and not _is_filled(folder, lock_descriptor):
                shutil.rmtree(folder, ignore_errors=True)  # incomplete, if a process was killed while it filled the folder
                folder.mkdir(mode=0o700)
                fill_folder(folder)
                (folder / FILLED_MARK_NAME).touch()
            fcntl.flock(lock_descriptor, fcntl.LOCK_SH)
        except BaseException:
            _release_folder(folder, lock_descriptor)
            raise
        # The kernel releases the exclusive lock before it grants the shared lock. In between, another process may have removed
        # the folder.
        if _is_filled(folder, lock_descriptor):
            return lock_descriptor
        os.close(lock_descriptor)


def _is_filled(folder: Path, lock_descriptor: int) -> bool:
    return _is_current_lock_file(folder, lock_descriptor) and (folder / FILLED_MARK_NAME).exists()


def _is_current_lock_file(folder: Path, lock_descriptor: int) -> bool:
    """Whether the lock file that was opened is still the lock file of the folder.

    False: another process removed the folder and its lock file after this process had opened the lock file.
    lock_descriptor: the descriptor of the lock file.
    """
    try:
        return os.path.samestat(os.fstat(lock_descriptor), os.lstat(f"{folder}{LOCK_SUFFIX}"))
    except FileNotFoundError:
        return False


def _release_folder(shared_folder: Path, lock_descriptor: int) -> bool:
    """Release the lock, and remove the folder if no other process uses it. Returns False if another process uses the folder.

    lock_descriptor: the descriptor of the lock file.
    """
    try:
        fcntl.flock(lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_current_lock_file(shared_folder, lock_descriptor):
            shutil.rmtree(shared_folder, ignore_errors=True)
            Path(f"{shared_folder}{LOCK_SUFFIX}").unlink()
    except BlockingIOError:
        return False  # another process uses the folder, and will remove it
    else:
        return True
    finally:
        os.close(lock_descriptor)
