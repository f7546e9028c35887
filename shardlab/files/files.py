"""Reads, replaces and locks files.

When a file is replaced, a reader sees the whole old file or the whole new file, even if the writer is killed.

All files of a workspace, of an archive or of a shared folder are opened here, because another person may have put anything in
their place: a link to a file of this user, a FIFO or a device that never ends. A test of this project refuses other opens.
"""

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

from shardlab.errors import InputError, WorkspaceError
from shardlab.terminal import printable

MOST_BYTES = 1 << 26  # the largest file that is read as one document, such as run.json or an expansion
MOST_RECORDS = 1 << 30  # the largest file of records that is read at once, such as steps/rank-00000.jsonl
PAGE_BYTES = 4096  # bytes; a file in /proc/sys has fewer


class NotRegular(OSError):
    """The path is not a regular file but, for example, a symlink or a FIFO. kind: the kind of file in words."""

    def __init__(self, path: Path | str, kind: str) -> None:
        super().__init__(errno.EINVAL, f"it is {kind}, and only regular files are read or written; remove it", str(path))
        self.kind = kind


class TooLarge(OSError):
    """The file has more bytes than files of its kind may have."""

    def __init__(self, path: Path | str, max_bytes: int) -> None:
        super().__init__(errno.EFBIG, f"it has more than {max_bytes:,} bytes, the limit for this kind of file", str(path))


def read(path: Path | str, max_bytes: int = MOST_BYTES, *, follow_links: bool = False) -> bytes:
    """The content of a regular file. Raises OSError as open does, NotRegular for a symlink, a FIFO, a socket or a device, and
    TooLarge.

    max_bytes: the largest allowed size in bytes. follow_links: as in `open_regular`.

    Only regular files are allowed, because the files of a run may come from another machine: a symlink could point to any file
    of this machine, and reading a FIFO could block for ever. For small files, this function is faster than Path.read_bytes.
    """
    descriptor, file_bytes = open_descriptor(path, follow_links=follow_links)
    try:
        # A file in /proc has the size 0, and the kernel gives its content only to the first read.
        first_bytes = os.read(descriptor, min(max(file_bytes, PAGE_BYTES), max_bytes) + 1)
        if len(first_bytes) == file_bytes <= max_bytes:
            return first_bytes
        content_parts, read_bytes = [first_bytes], len(first_bytes)
        while first_bytes and read_bytes <= max_bytes:  # the file has grown, or is larger than one read of the kernel
            content_parts.append(first_bytes := os.read(descriptor, 1 << 20))
            read_bytes += len(first_bytes)
    finally:
        os.close(descriptor)
    if read_bytes > max_bytes:
        raise TooLarge(path, max_bytes)
    return b"".join(content_parts)


def open_regular(path: Path | str, *, follow_links: bool = False) -> io.BufferedReader:
    """Open a regular file for reading. Raises OSError as open does, and NotRegular.

    follow_links: whether the path may be a symlink to a regular file. Only for a file that the user names, such as a cluster
    file that several workspaces share.
    """
    return os.fdopen(open_descriptor(path, follow_links=follow_links)[0], "rb")


def open_descriptor(path: Path | str, *, follow_links: bool = False) -> tuple[int, int]:
    """Open a regular file for reading. Returns (descriptor, size of the file in bytes). The caller closes the descriptor.

    follow, and what it raises: as `open_regular`.
    """
    return _open(path, os.O_RDONLY if follow_links else os.O_RDONLY | os.O_NOFOLLOW)


def _open(path: Path | str, flags: int, mode: int = 0o644) -> tuple[int, int]:
    """Open a regular file. Returns (descriptor, size in bytes). flags: of os.open. mode: the permissions of a new file."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # the path is a symlink (ELOOP) or a socket (ENXIO)
            raise NotRegular(path, describe_file_kind(os.lstat(path).st_mode)) from None
        raise
    file_stat = os.fstat(descriptor)
    if not stat.S_ISREG(file_stat.st_mode):
        os.close(descriptor)
        raise NotRegular(path, describe_file_kind(file_stat.st_mode))
    return descriptor, file_stat.st_size


def describe_file_kind(file_mode: int) -> str:
    """The kind of file in words, such as `a symlink`. file_mode: the mode of the file (st_mode)."""
    phrase_by_kind = {
        stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symlink", stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    }  # fmt: skip
    return phrase_by_kind.get(stat.S_IFMT(file_mode), "of an unknown kind")


def write_atomic(path: Path, content: bytes, *, sync: bool = True, mode: int = 0o644) -> None:
    """Write the content to a temporary file in the folder of `path`, and rename the temporary file to `path`.

    sync: whether to wait until the content is on the disk. mode: the permissions of the file.
    Raises WorkspaceError; `path` is then unchanged.
    """
    temporary_path = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        _write_file(temporary_path, content, sync=sync, mode=mode)
        os.rename(temporary_path, path)
        if sync:
            sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary_path.unlink(missing_ok=True)
        raise WorkspaceError.from_os_error(_make_error_for_path(error, path), "write") from error


def write_new(path: Path, content: bytes | memoryview, *, mode: int = 0o644) -> None:
    """Write a new file directly, without a temporary file. mode: the permissions of the file. Raises WorkspaceError.

    The file must be in a folder that no other process reads yet, because a reader could see a half-written file.
    """
    try:
        _write_file(path, content, sync=False, mode=mode)
    except OSError as error:
        raise WorkspaceError.from_os_error(_make_error_for_path(error, path), "write") from error


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write the whole content to a descriptor, which may take several writes. Raises OSError."""
    unwritten_bytes = memoryview(content)
    while unwritten_bytes:
        unwritten_bytes = unwritten_bytes[os.write(descriptor, unwritten_bytes) :]


def append(path: Path, content: bytes) -> None:
    """Append to a regular file, which is created if it does not exist. Raises OSError.

    If the process is killed, the file may have only the beginning of the content.
    """
    with open_append(path) as appended_file:
        write_all(appended_file.fileno(), content)


def open_append(path: Path) -> io.FileIO:
    """Open a regular file, which is created if it does not exist, for appending, for example as the output of a process.

    Raises OSError, NotRegular.
    """
    return os.fdopen(open_append_descriptor(path), "ab", buffering=0)


def open_append_descriptor(path: Path) -> int:
    """As `open_append`, but returns a descriptor, which can be read too. The caller closes the descriptor."""
    descriptor, _ = _open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
    os.set_blocking(descriptor, True)  # a process that inherits the descriptor expects this
    return descriptor


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, opened for writing. At the end of the block, the file is synced and renamed to `path`.

    If the block raises an exception, the temporary file is deleted and `path` is unchanged. Raises WorkspaceError.
    """
    temporary_path = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary_path.open("xb") as temporary_file:
            yield temporary_file
            temporary_file.flush()
            os.fsync(temporary_file.fileno())
        temporary_path.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise WorkspaceError.from_os_error(_make_error_for_path(error, path), "write") from error
    finally:
        temporary_path.unlink(missing_ok=True)


def write_json(path: Path, json_value: Any, *, sync: bool = True) -> None:
    """Write `json_value` as indented JSON to the file `path`. sync: as in `write_atomic`.

    Raises WorkspaceError as `write_atomic` does, and InputError for text that is not UTF-8 (see `encode_json`).
    """
    write_atomic(path, encode_json(json_value), sync=sync)


def encode_json(json_value: Any) -> bytes:
    """`json_value` as indented JSON, for the content of a file.

    Raises InputError for text that is not UTF-8. Names of files can be such text. The function does not replace the bytes that
    are not UTF-8, because the JSON would then contain the name of another file.
    """
    try:
        json_bytes = msgspec.json.encode(json_value)
    except UnicodeEncodeError as error:
        raise InputError(
            f"{error.object[:200]!r}: contains bytes that are not UTF-8, which no JSON file can store. Allowed: names in UTF-8."
        ) from None
    return _indent_json(printable.escape_unprintable(json_bytes))


def write_document(path: Path, json_value: Any) -> None:
    """Write `json_value` as indented JSON to the file `path`, for people to read. Bytes that are not UTF-8 become "?".

    Raises WorkspaceError.
    """
    write_atomic(path, _indent_json(printable.encode_printable_json(json_value)))


def _indent_json(json_bytes: bytes) -> bytes:
    return msgspec.json.format(json_bytes, indent=2) + b"\n"


def make_folder(folder: Path) -> None:
    """Create a folder and its parents. Raises WorkspaceError."""
    with as_workspace_error("create the folder"):
        folder.mkdir(parents=True, exist_ok=True)


def move_into_place(arrived_path: Path, target_path: Path) -> None:
    """Move a file that has arrived to its final path, with the permissions of a new file of this user. Raises OSError."""
    target_path.parent.mkdir(parents=True, exist_ok=True)
    arrived_path.chmod(apply_umask(0o644))
    arrived_path.replace(target_path)


def apply_umask(wanted_mode: int) -> int:
    """The permissions that a new file or folder gets if a process with the current umask creates it with `wanted_mode`."""
    umask = os.umask(0o077)
    os.umask(umask)
    return wanted_mode & ~umask


def list_names(folder: Path | str) -> list[str]:
    """The sorted names of the files and folders in a folder; empty if the folder does not exist. Raises WorkspaceError."""
    try:
        with os.scandir(folder) as folder_entries:
            return sorted(folder_entry.name for folder_entry in folder_entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "read") from error


def is_folder(path: Path | str) -> bool:
    """Whether the path is a folder. A symbolic link to a folder does not count, because it could lead to any other folder."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def is_utf8(file_name: str) -> bool:
    """Whether the name of a file is valid UTF-8, so that a JSON file can store it."""
    try:
        file_name.encode()
    except UnicodeEncodeError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename in the folder survives a power failure, if the file system supports this."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def hold_lock(lock_path: Path, on_busy: Callable[[int], object] = lambda _descriptor: None) -> Iterator[int]:
    """Hold an exclusive lock (flock) on a lock file during the block; yield the descriptor of the file.

    The kernel releases the lock when the process ends, even if the process is killed.
    lock_path: the lock file, which is created if it does not exist.
    on_busy: a function that is called with the descriptor if another process holds the lock. If `on_busy` raises an exception,
    the block is not executed; if `on_busy` returns, this function waits for the lock. Raises WorkspaceError if the file cannot
    be opened."""
    descriptor = _open_lock(lock_path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_busy(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """Open a lock file, which is created if it does not exist. Returns the descriptor, which child processes do not inherit."""
    make_folder(path.parent)
    with as_workspace_error("lock"):
        try:
            # Every user who can open the file can hold the lock, so only users with access to the folder may open the file.
            lock_mode = 0o600 | (path.parent.stat().st_mode & 0o066)
            return _open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, lock_mode)[0]
        except PermissionError:  # the file belongs to another user, such as root: this user can lock it, but not write to it
            return open_descriptor(path)[0]


def compute_file_sha256(path: Path) -> str:
    """The SHA-256 of the content of a regular file, in hexadecimal. Raises OSError, NotRegular."""
    with open_regular(path) as opened_file:
        return hashlib.file_digest(opened_file, "sha256").hexdigest()


@contextlib.contextmanager
def as_workspace_error(failed_action: str) -> Iterator[None]:
    """Turn an OSError of the block into a WorkspaceError with one sentence for the user. failed_action: a verb, such as `read`.

    A BrokenPipeError is not changed: no file causes it, but the reader of this command's output who has gone.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise WorkspaceError.from_os_error(error, failed_action) from error


def _write_file(path: Path, content: bytes | memoryview, *, sync: bool, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        write_all(descriptor, content)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_error_for_path(error: OSError, path: Path) -> OSError:
    """A copy of the error that names `path`, the file that the user knows, instead of the temporary file."""
    return OSError(error.errno, error.strerror, str(path))
