"""Reads the records that were appended to a file since the last reading: what a long run wrote before is not read again."""

from __future__ import annotations

import os
import re
import stat
from typing import Generic, TypeVar

from shardlab import files
from shardlab.decoders import DECODE_FAULTS, decoder
from shardlab.record import Record
from shardlab.rundir import RunDir

_HOST = re.compile(r"([^/]+)\.jsonl")
R = TypeVar("R", bound=Record)
MOST_BYTES = 1 << 20  # of a reading: several thousand records


class FollowedRecords(Generic[R]):
    """A record file that grows."""

    def __init__(self, path: str, kind: type[R]) -> None:
        self.path = path
        self._decoder = decoder(kind)
        self._inode = 0
        self._read = 0  # bytes

    def new(self) -> list[R] | None:
        """The next records since the last call, from MOST_BYTES at most: call it again until it returns none.

        None: the file was replaced or got shorter, so earlier records no longer count.

        The unfinished last line is left for the next call. A damaged line, and a file that cannot be read, give no records:
        `collect summarize` says what is damaged.
        """
        try:
            status = os.lstat(self.path)
        except OSError:
            return None if self._read else []
        if self._read and (status.st_ino != self._inode or status.st_size < self._read):
            return None
        if status.st_size == self._read:
            return []
        try:
            with files.open_regular(self.path) as handle:
                self._inode = os.fstat(handle.fileno()).st_ino
                handle.seek(self._read)
                content = handle.read(MOST_BYTES)
        except OSError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        return self._decoded(whole)

    def _decoded(self, lines: bytes) -> list[R]:
        records = []
        for line in lines.split(b"\n")[:-1]:
            try:
                records.append(self._decoder.decode(line))
            except DECODE_FAULTS:
                continue
        return records


def sampled_hosts(folder: RunDir) -> list[str]:
    """The hosts that have a file of telemetry in a run, sorted."""
    path = f"{folder.path}/samples"
    names = sorted(os.listdir(path)) if is_folder(path) else []  # noqa: PTH208 - names alone
    return [match[1] for name in names if (match := _HOST.fullmatch(name))]


def is_folder(path: str) -> bool:
    """Whether it is a folder and no link to a folder, which could lead out of the run."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
