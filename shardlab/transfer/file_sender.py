"""Sends files to another machine, as shardlab.transfer.messages says. Each file is read once: it is hashed while it is sent."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator

import msgspec
import zstandard

from shardlab.files import files
from shardlab.transfer.manifest import ManifestFile
from shardlab.transfer.messages import BLOCK_BYTES, BLOCK_LENGTH, FileBegin, HeldFile

# Names of files that contain text, which is compressed. Other files of a run, such as traces, are compressed already.
TEXT_SUFFIXES = (".jsonl", ".json", ".log", ".out", ".err", ".txt", ".yaml", ".sh", ".sbatch", ".csv")
ZSTD_LEVEL = 1  # how thoroughly zstd compresses: higher levels need more time and make records no smaller
MOST_WAITING_BYTES = BLOCK_BYTES  # bytes that are written at once: a run may have thousands of small files
# the most bytes of a block of a large file that is copied, to be written together with other blocks
MOST_COPIED_BYTES = 1 << 15


class FileSender:
    """Sends messages and files to one machine."""

    def __init__(self, write_through: Callable[[bytes | memoryview], object]) -> None:
        """write_through: sends bytes at once, and raises an exception if it cannot."""
        self._write_through = write_through
        self._encoder = msgspec.json.Encoder()
        self._unwritten_parts: list[bytes] = []  # what is not yet sent
        self._unwritten_bytes = 0  # size of `_unwritten_parts` in bytes
        self._buffer = memoryview(bytearray(BLOCK_BYTES))  # the block of a file that is being sent
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)

    def send_message(self, message: object) -> None:
        """Send a message, at the latest with the next `flush_output`."""
        self._add_output(self._encoder.encode(message) + b"\n")

    def flush_output(self) -> None:
        """Send everything that is not yet sent."""
        self._write_through(b"".join(self._unwritten_parts))
        self._unwritten_parts, self._unwritten_bytes = [], 0

    def send_file(
        self,
        path: str,
        file_name: str,
        file_bytes: int,
        mtime_ns: int,
        held_file: HeldFile | None = None,
        *,
        is_shared: bool = False,
    ) -> ManifestFile:
        """Send a file from where the other machine's copy ends. Returns the size and the digest of the file as it was sent.

        file_name: the name in the message. file_bytes, mtime_ns: size and time of the file before it is opened; what is
        appended later is not sent. held_file: the copy of the other machine. is_shared: whether the content is not sent. Raises
        OSError.
        """
        descriptor, _ = files.open_descriptor(path)
        try:
            begin_byte, sha256 = 0, hashlib.sha256()
            if held_file is not None and held_file.bytes <= file_bytes:
                for block in self._read_blocks(descriptor, 0, held_file.bytes):
                    sha256.update(block)
                    begin_byte += len(block)
                if begin_byte != held_file.bytes or sha256.hexdigest() != held_file.sha256:
                    begin_byte, sha256 = 0, hashlib.sha256()
            if file_bytes and begin_byte == file_bytes:  # the other machine has the whole file
                return ManifestFile(file_bytes, mtime_ns, sha256.hexdigest())
            is_compressed = file_name.endswith(TEXT_SUFFIXES)
            end_byte = begin_byte
            if is_shared:
                for block in self._read_blocks(descriptor, begin_byte, file_bytes):
                    sha256.update(block)
                    end_byte += len(block)
                self.send_message(FileBegin(file_name, begin_byte, end_byte, mtime_ns))
            elif (
                file_bytes - begin_byte <= BLOCK_BYTES
                and len(block := self._read_block(descriptor, begin_byte, file_bytes)) == file_bytes - begin_byte
            ):
                sha256.update(block)
                end_byte = file_bytes
                block_bytes = self._compressor.compress(block) if is_compressed else bytes(block)
                self.send_message(FileBegin(file_name, begin_byte, file_bytes, mtime_ns, is_compressed, len(block_bytes)))
                self._add_output(block_bytes)
            else:
                self.send_message(FileBegin(file_name, begin_byte, file_bytes, mtime_ns, is_compressed))
                try:
                    for block in self._read_blocks(descriptor, begin_byte, file_bytes):
                        sha256.update(block)
                        end_byte += len(block)
                        self._send_block(self._compressor.compress(block) if is_compressed else block)
                finally:
                    self._send_block(b"")  # also if the file cannot be read further, so that the next message is understood
        finally:
            os.close(descriptor)
        return ManifestFile(end_byte, mtime_ns, sha256.hexdigest())

    def _read_blocks(self, descriptor: int, begin_byte: int, end_byte: int) -> Iterator[memoryview]:
        """The bytes of a file from `begin_byte` to `end_byte` in blocks; fewer bytes if the file has become shorter.

        A block is valid until the next block is taken: all blocks are read into the same memory, because new memory for each
        block would take longer than reading the block.
        """
        while begin_byte < end_byte and (block := self._read_block(descriptor, begin_byte, end_byte)):
            begin_byte += len(block)
            yield block

    def _read_block(self, descriptor: int, begin_byte: int, end_byte: int) -> memoryview:
        """The bytes of a file from `begin_byte` to `end_byte`, at most one block; fewer bytes if the file has become
        shorter."""
        return self._buffer[: os.preadv(descriptor, [self._buffer[: min(BLOCK_BYTES, end_byte - begin_byte)]], begin_byte)]

    def _send_block(self, block: bytes | memoryview) -> None:
        self._add_output(BLOCK_LENGTH.pack(len(block)))
        if len(block) > MOST_COPIED_BYTES:
            self.flush_output()
            self._write_through(block)
        else:
            self._add_output(bytes(block))

    def _add_output(self, sent_part: bytes) -> None:
        self._unwritten_parts.append(sent_part)
        self._unwritten_bytes += len(sent_part)
        if self._unwritten_bytes > MOST_WAITING_BYTES:
            self.flush_output()
