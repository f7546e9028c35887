"""Reads, replaces and locks files. A reader sees the whole old file or the whole new file, even if the writer is killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from shardlab import printable
from shardlab.errors import InputError, WorkspaceError


class NotRegular(OSError):
    """The path is not a regular file but, for example, a symlink or a FIFO."""

    def __init__(self, path: Path | str, kind: str) -> None:
        super().__init__(errno.EINVAL, f"it is {kind}, and only regular files are read; remove it", str(path))
        self.kind = kind


def read(path: Path | str) -> bytes:
    """The content of a regular file. Raises OSError as open does, and NotRegular for a symlink, a FIFO, a socket or a device.

    A file of a run may come from another machine: a symlink could lead anywhere, and a FIFO would block for ever. A small file
    takes less time than with Path.read_bytes.
    """
    descriptor, size = _open_regular(path)
    try:
        content = os.read(descriptor, size + 1)
        if len(content) == size:
            return content
        parts = [content]
        while content := os.read(descriptor, 1 << 20):  # it grew since, or is larger than the kernel reads at once
            parts.append(content)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def open_regular(path: Path | str) -> io.BufferedReader:
    """A regular file, open for reading. Raises as `read` does."""
    return os.fdopen(_open_regular(path)[0], "rb")


def _open_regular(path: Path | str) -> tuple[int, int]:
    """(the descriptor, the size in bytes)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symlink, a socket
            raise NotRegular(path, kind_of(os.lstat(path).st_mode)) from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise NotRegular(path, kind_of(status.st_mode))
    return descriptor, status.st_size


def kind_of(mode: int) -> str:
    """The kind of file that a mode describes, in words."""
    kinds = {
        stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symlink", stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "of an unknown kind")


def write_atomic(path: Path, content: bytes, *, sync: bool = True, mode: int = 0o644) -> None:
    """Write beside `path`, sync if asked, rename over it. Raises WorkspaceError; `path` is then as it was."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        _write(temporary, content, sync=sync, mode=mode)
        os.rename(temporary, path)
        if sync:
            sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise WorkspaceError.from_os_error(_named(error, path), "write") from error


def write_new(path: Path, content: bytes | memoryview, *, mode: int = 0o644) -> None:
    """Write a file in a folder that no reader uses yet, so that nobody sees a half-written file. Raises WorkspaceError."""
    try:
        _write(path, content, sync=False, mode=mode)
    except OSError as error:
        raise WorkspaceError.from_os_error(_named(error, path), "write") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A new file to write beside `path`, synced and renamed over it at the end, deleted if the block raises.

    Raises WorkspaceError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise WorkspaceError.from_os_error(_named(error, path), "write") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """`value` as indented JSON, atomically."""
    write_atomic(path, as_json(value), sync=sync)


def as_json(value: Any) -> bytes:
    """`value` as a file of indented JSON.

    Raises InputError for a text that is not UTF-8, which the name of a file can be: if it was replaced by other text, the JSON
    file would name another file.
    """
    try:
        document = msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise InputError(
            f"{error.object[:200]!r}: contains bytes that are not UTF-8, which no JSON file can store. Allowed: names in UTF-8."
        ) from None
    return _indented(printable.escaped(document))


def write_document(path: Path, value: Any) -> None:
    """`value` as indented JSON for people, atomically, with "?" for bytes that are not UTF-8. Raises WorkspaceError."""
    write_atomic(path, _indented(printable.json(value)))


def _indented(document: bytes) -> bytes:
    return msgspec.json.format(document, indent=2) + b"\n"


def make_folder(path: Path) -> None:
    """Create a folder and its parents. Raises WorkspaceError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "create the folder") from error


def names(folder: Path | str) -> list[str]:
    """The sorted names in a folder; none if the folder does not exist. Raises WorkspaceError."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read") from error


def sync_folder(path: Path) -> None:
    """Make a rename in `path` survive a power loss, if the file system allows it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, busy: Callable[[int], object] = lambda _descriptor: None) -> Iterator[int]:
    """Hold the lock of this file; yield the descriptor of the file. The kernel releases the lock however its holder ends.

    busy: called with the descriptor if another process holds the lock. If it returns, wait for the lock; to refuse, it raises.
    Raises WorkspaceError if the file cannot be opened.
    """
    descriptor = _open_lock(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """The lock file, created if it does not exist. Programs that this program starts do not inherit the descriptor."""
    make_folder(path.parent)
    flags = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with as_workspace_error("lock"):
        try:
            # Whoever can open the file can hold the lock: allow this to nobody who has no access to the folder.
            mode = 0o600 | (path.parent.stat().st_mode & 0o066)
            descriptor = os.open(path, flags | os.O_RDWR, mode)
        except PermissionError:  # the file of another user, such as root: it can be locked, but not written
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise WorkspaceError(f"cannot lock {path}: it is not a regular file; remove it.")
    return descriptor


def sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextlib.contextmanager
def as_workspace_error(doing: str) -> Iterator[None]:
    """Turn an OSError of the block into one sentence for a person."""
    try:
        yield
    except OSError as error:
        raise WorkspaceError.from_os_error(error, doing) from error


def _write(path: Path, content: bytes | memoryview, *, sync: bool, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _named(error: OSError, path: Path) -> OSError:
    """The error with the name of the file that was meant, not of the temporary beside it."""
    return OSError(error.errno, error.strerror, str(path))
