"""Reads a record file that is still growing: each reading returns only the records that were appended since the last reading.

So each record of a long run is read once.
"""

from __future__ import annotations

import os
import re
from typing import Generic, TypeVar

from shardlab.files import files
from shardlab.runs.record import Record, decode_lines
from shardlab.runs.rundir import RunDir

_HOST = re.compile(r"([^/]+)\.jsonl")
R = TypeVar("R", bound=Record)
MOST_BYTES = 1 << 20  # the most bytes of one reading, which are several thousand records


class FollowedRecords(Generic[R]):
    """A record file that grows while a run writes to it. kind: the type of the records in the file, such as StepRecord."""

    def __init__(self, path: str, kind: type[R]) -> None:
        self.path = path
        self._kind = kind
        self._inode = 0
        self._read = 0  # number of bytes of the file that were read so far

    def read_new(self) -> list[R] | None:
        """The records appended since the last call, from at most MOST_BYTES. Call `read_new` until it returns an empty
        list.

        Returns None if the file was replaced or got shorter. The records that earlier calls returned are then no longer valid.

        If the last line is not finished, a later call returns it. A damaged line, and a file that cannot be read, are skipped
        without an error, because `collect summarize` reports damage.
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
        whole_lines = content[: content.rfind(b"\n") + 1]
        self._read += len(whole_lines)
        return decode_lines(whole_lines, self._kind).records


def list_sampled_hosts(run_dir: RunDir) -> list[str]:
    """The sorted names of the hosts that have a file with telemetry samples in a run folder."""
    path = f"{run_dir.path}/samples"
    names = sorted(os.listdir(path)) if files.is_folder(path) else []  # noqa: PTH208 - names alone
    return [match[1] for name in names if (match := _HOST.fullmatch(name))]
