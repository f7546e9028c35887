"""Receives the files of runs into staging folders, and hashes each file while it arrives. collect/fetching/download.py compares
the hashes with the manifest of the cluster.

What the cluster sends is not trusted: the name of each file is checked, and only regular files below the staging folder, which
only this user can open, are written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zstandard

from shardlab.errors import InputError
from shardlab.files import files, json_file
from shardlab.files.files import NotRegular
from shardlab.transfer import manifest
from shardlab.transfer.manifest import ManifestFile
from shardlab.transfer.messages import BLOCK_BYTES, BLOCK_LENGTH, FILE_OR_END, FileBegin, HeldFile, RunEnd

if TYPE_CHECKING:  # not needed on the machine that SSH leads to
    from shardlab.remote.remote_conversation import RemoteConversation

MOST_BLOCK_BYTES = BLOCK_BYTES + BLOCK_BYTES // 16  # zstd makes a block that it cannot compress a little larger

_DECOMPRESSOR = zstandard.ZstdDecompressor(max_window_size=BLOCK_BYTES)


T = TypeVar("T")


class StandardInputReceiver:
    """What another machine sends to a program that it started over SSH."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream

    def receive(self, target_type: type[T]) -> T:
        """Receive one message. Raises InputError."""
        return json_file.decode_standard_input(self._stream.readline(), target_type, "a message of this version")

    def receive_into(self, buffer: memoryview) -> None:
        """Fill a buffer. Raises InputError if the connection broke."""
        while buffer:
            if not (read_count := self._stream.readinto(buffer)):
                raise InputError("the connection broke in the middle of a file.")
            buffer = buffer[read_count:]


class HeldCopy(msgspec.Struct):
    """A file, or the beginning of a file, on this machine. The cluster need not send this content."""

    path: Path
    file: HeldFile


class ArrivedRun(msgspec.Struct):
    """The files of a run that arrived in a staging folder."""

    run_end: RunEnd
    files: dict[str, ManifestFile]
    """By name: size, time and SHA-256 of a file as it was written."""
    is_alone: bool
    """Whether the staging folder was made for these files, so that it contains no other entries."""


class RunReceiver:
    """Receives the files of runs, one run after the other."""

    def __init__(
        self,
        connection: RemoteConversation | StandardInputReceiver,
        shared_runs: Path | None = None,
        report_bytes: Callable[[int], None] = lambda _count: None,
        asked_names: Container[str] | None = None,
    ) -> None:
        """Prepare to receive runs.

        shared_runs: the folder that contains the runs of the cluster, if this machine sees that folder; the content of files is
        then read there. report_bytes: is called from time to time with the number of bytes that have come, over all runs.
        asked_names: the only names that files may have; None: all that files of a run may have."""
        self._connection, self._shared_runs, self._report_bytes = connection, shared_runs, report_bytes
        self._asked_names = asked_names
        self._received_bytes = self._next_report_at = 0
        self._buffer = memoryview(bytearray(MOST_BLOCK_BYTES))
        self._length_buffer = memoryview(bytearray(BLOCK_LENGTH.size))

    def receive_run(self, run_id: str, staging_folder: Path, local_copies: Mapping[str, HeldCopy]) -> ArrivedRun:
        """Receive all files of a run. staging_folder: the folder of this run into which the files are written. local_copies:
        what is on this machine already, by name of the file.

        Raises InputError if the cluster sends something that is not allowed, and OSError if a file cannot be written.
        """
        arrived_files: dict[str, ManifestFile] = {}
        is_alone = not os.path.lexists(staging_folder)
        while not isinstance(message := self._connection.receive(FILE_OR_END), RunEnd):
            if self._asked_names is None:
                manifest.check_received_name(message.name)
            elif message.name not in self._asked_names:
                raise InputError(f"the cluster sends {message.name[:100]!r}, which was not asked for")
            local_copy = local_copies.get(message.name)
            if message.begin and (local_copy is None or local_copy.file.bytes != message.begin):
                raise InputError(f"the cluster sends {message.name} from byte {message.begin} on, which was not asked for")
            blocks: Iterable[memoryview | bytes]
            if self._shared_runs:
                blocks = _read_blocks(self._shared_runs / run_id / message.name, message.begin, message.bytes)
            elif message.follows is not None:
                blocks = (self._receive_block(message, message.follows),)
            else:
                blocks = self._receive_blocks(message)
            staged_path, held_copy = f"{staging_folder}/{message.name}", local_copy if message.begin else None
            # A file is never written twice into a new folder. Some file systems store `a` and `A` as the same file.
            extra_flags = os.O_EXCL if is_alone else os.O_TRUNC if held_copy is None else 0
            arrived_files[message.name] = self._write_file(staged_path, extra_flags, held_copy, blocks, message.mtime_ns)
        self._report_bytes(self._received_bytes)
        return ArrivedRun(message, arrived_files, is_alone)

    def _write_file(
        self, file_path: str, extra_flags: int, held_copy: HeldCopy | None, blocks: Iterable[memoryview | bytes], mtime_ns: int
    ) -> ManifestFile:
        """Write a file. Returns what was written.

        extra_flags: further flags of `os.open`. held_copy: the file with whose content it begins, which may be the file itself.
        blocks: the rest of the content. mtime_ns: the time of the last change that the file gets.
        """
        sha256 = hashlib.sha256()
        descriptor = _open_file(file_path, extra_flags)
        try:
            written_bytes = 0
            if held_copy is not None:
                is_in_place = str(held_copy.path) == file_path
                for block in _read_blocks(held_copy.path, 0, held_copy.file.bytes):
                    sha256.update(block)
                    files.write_all(descriptor, b"" if is_in_place else block)
                    written_bytes += len(block)
                os.lseek(descriptor, written_bytes, os.SEEK_SET)
            for block in blocks:
                sha256.update(block)
                files.write_all(descriptor, block)
                written_bytes += len(block)
                self._received_bytes += len(block)
                if self._received_bytes >= self._next_report_at:
                    self._next_report_at = self._received_bytes + BLOCK_BYTES
                    self._report_bytes(self._received_bytes)
            if held_copy is not None:
                os.ftruncate(descriptor, written_bytes)
            os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(descriptor)
        return ManifestFile(written_bytes, mtime_ns, sha256.hexdigest())

    def _receive_blocks(self, file_begin: FileBegin) -> Iterator[memoryview | bytes]:
        while True:
            self._connection.receive_into(self._length_buffer)
            (block_length,) = BLOCK_LENGTH.unpack(self._length_buffer)
            if not block_length:
                return
            yield self._receive_block(file_begin, block_length)

    def _receive_block(self, file_begin: FileBegin, block_length: int) -> memoryview | bytes:
        if block_length > MOST_BLOCK_BYTES:
            raise InputError(f"the cluster sends a block of {block_length:,} bytes; allowed are {MOST_BLOCK_BYTES:,}")
        block = self._buffer[:block_length]
        self._connection.receive_into(block)
        return _decompress_block(block, file_begin.name) if file_begin.is_compressed else block


def _decompress_block(block: memoryview, file_name: str) -> bytes:
    try:
        content_bytes = zstandard.frame_content_size(block)
        # zstandard reserves as much memory as the block says; -1: the block does not say a size
        if not 0 <= content_bytes <= BLOCK_BYTES:
            size_text = (
                "that does not say its size"
                if content_bytes < 0
                else f"of {content_bytes:,} bytes; allowed are {BLOCK_BYTES:,}"
            )
            raise InputError(f"the cluster sends {file_name} with a block {size_text}")
        return _DECOMPRESSOR.decompress(block, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InputError(f"the cluster sends {file_name} with a block that zstd cannot decompress ({error})") from None


def _open_file(path: str, extra_flags: int) -> int:
    """Open a file of the staging folder for writing, and make the folders around it. extra_flags: more flags of `open`."""
    open_flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | extra_flags
    try:
        return os.open(path, open_flags, 0o644)
    except FileNotFoundError:
        _make_folder(Path(path).parent)
        return os.open(path, open_flags, 0o644)


def _make_folder(folder: Path) -> None:
    """Make a folder and the folders around it, all with the mode of a folder of a run. `Path.mkdir` gives the folders around it
    another mode."""
    try:
        folder.mkdir(mode=0o755)
    except FileNotFoundError:
        _make_folder(folder.parent)
        folder.mkdir(mode=0o755)
    except FileExistsError:
        if not folder.is_dir():
            raise


def _read_blocks(path: Path, begin_byte: int, end_byte: int) -> Iterator[memoryview | bytes]:
    """The bytes of a regular file from `begin_byte` to `end_byte`, in blocks; fewer bytes if the file is shorter, has vanished
    or is something else now, which the SHA-256 shows."""
    with contextlib.suppress(FileNotFoundError, NotRegular), files.open_regular(path) as opened_file:
        opened_file.seek(begin_byte)
        while begin_byte < end_byte and (block := opened_file.read(min(BLOCK_BYTES, end_byte - begin_byte))):
            begin_byte += len(block)
            yield block
