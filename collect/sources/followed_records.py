"""Reads a record file that is still growing, each record once."""

from __future__ import annotations

import os
import re
from typing import Generic, TypeVar

from shardlab.files import files
from shardlab.runs.record import Record, decode_records
from shardlab.runs.rundir import RunDir

_HOST_FILE = re.compile(r"([^/]+)\.jsonl")
R = TypeVar("R", bound=Record)
MOST_BYTES = 1 << 20  # the most bytes of one reading, which are several thousand records


class FollowedRecords(Generic[R]):
    """A record file that grows while a run writes to it. record_type: such as StepRecord."""

    def __init__(self, path: str, record_type: type[R]) -> None:
        self.path = path
        self._record_type = record_type
        self._inode = 0
        self._read_bytes = 0  # number of bytes of the file that were read so far

    def read_new(self) -> list[R] | None:
        """The records appended since the last call, from at most MOST_BYTES. Call it until it returns an empty list.

        None if the file was replaced or got shorter, so that the records of earlier calls are no longer valid. An unfinished
        line is left for a later call. Damaged lines and files are skipped, because `collect summarize` reports damage.
        """
        try:
            status = os.lstat(self.path)
        except OSError:
            return None if self._read_bytes else []
        if self._read_bytes and (status.st_ino != self._inode or status.st_size < self._read_bytes):
            return None
        if status.st_size == self._read_bytes:
            return []
        try:
            with files.open_regular(self.path) as handle:
                self._inode = os.fstat(handle.fileno()).st_ino
                handle.seek(self._read_bytes)
                content = handle.read(MOST_BYTES)
        except OSError:
            return []
        whole_lines = content[: content.rfind(b"\n") + 1]
        self._read_bytes += len(whole_lines)
        return decode_records(whole_lines, self._record_type).records


def list_sampled_hosts(run_dir: RunDir) -> list[str]:
    """The sorted names of the hosts that have a file with telemetry samples in a run folder."""
    path = f"{run_dir.path}/samples"
    names = sorted(os.listdir(path)) if files.is_folder(path) else []  # noqa: PTH208 - names alone
    return [match[1] for name in names if (match := _HOST_FILE.fullmatch(name))]
