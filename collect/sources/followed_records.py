"""Reads a record file that is still growing, each record once."""

from __future__ import annotations

import os
import re
from typing import Generic, TypeVar

from shardlab.files import files
from shardlab.runs.record import Record, decode_records
from shardlab.runs.rundir import RunDir

_HOST_FILE_NAME = re.compile(r"([^/]+)\.jsonl")
R = TypeVar("R", bound=Record)
MOST_BYTES_PER_READ = 1 << 20  # the most bytes of one reading, which are several thousand records


class FollowedRecords(Generic[R]):
    """A record file that grows while a run writes to it. record_type: such as StepRecord."""

    def __init__(self, path: str, record_type: type[R]) -> None:
        self.path = path
        self._record_type = record_type
        self._inode = 0
        self._read_bytes = 0  # number of bytes of the file that were read so far

    def read_new(self) -> list[R] | None:
        """The records appended since the last call, from at most MOST_BYTES_PER_READ. Call it until it returns an empty list.

        None if the file was replaced or got shorter, so that the records of earlier calls are no longer valid. An unfinished
        line is left for a later call. Damaged lines and files are skipped, because `collect summarize` reports damage.
        """
        try:
            file_status = os.lstat(self.path)
        except OSError:
            return None if self._read_bytes else []
        if self._read_bytes and (file_status.st_ino != self._inode or file_status.st_size < self._read_bytes):
            return None
        if file_status.st_size == self._read_bytes:
            return []
        try:
            with files.open_regular(self.path) as record_file:
                self._inode = os.fstat(record_file.fileno()).st_ino
                record_file.seek(self._read_bytes)
                new_bytes = record_file.read(MOST_BYTES_PER_READ)
        except OSError:
            return []
        whole_lines = new_bytes[: new_bytes.rfind(b"\n") + 1]
        self._read_bytes += len(whole_lines)
        return decode_records(whole_lines, self._record_type).records


def list_sampled_hosts(run_dir: RunDir) -> list[str]:
    """The sorted names of the hosts that have a file with telemetry samples in a run folder."""
    samples_folder = f"{run_dir.path}/samples"
    file_names = sorted(os.listdir(samples_folder)) if files.is_folder(samples_folder) else []  # noqa: PTH208 - names alone
    return [match[1] for file_name in file_names if (match := _HOST_FILE_NAME.fullmatch(file_name))]
