"""Detects that the ranks of a run hang, by the key `hang_limit` of its cell (shardlab/matrix/cell.py).

A run hangs if none of its files, except logs and telemetry, has changed for the time of its hang limit, the key `hang_limit` of
a cell.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from shardlab.runs.record import StepRecord
from shardlab.runs.rundir import RunDir

# Folders of a run whose files may change although its ranks make no progress: logs (which receive the stacks of hanging ranks),
# telemetry, and the claim.
NO_PROGRESS = ("log", "samples", "claim")
# The time between two checks is the share INTERVAL_SHARE of the hang limit, but at least LEAST_S and at most MOST_S seconds. A
# check is not cheap: it reads the attributes of every file of the run.
INTERVAL_SHARE, LEAST_S, MOST_S = 1 / 60, 1.0, 30.0
MOST_RANKS = 8  # the most ranks that a sentence names


class HangWatch:
    """Measures for how long no file of a run has changed. Time in which this process itself was suspended does not count."""

    def __init__(self, run_dir: RunDir, limit_s: float) -> None:
        """Start to watch a run.

        run_dir: the run's folder. limit_s: the hang limit, which is the longest allowed time in seconds without a change of a
        file. The time begins to count now, so the start of the ranks may also take limit_s seconds.
        """
        self._folder, self._limit_s = run_dir, limit_s
        self._interval_s = max(LEAST_S, min(MOST_S, INTERVAL_SHARE * limit_s))
        self._last_check_s = time.monotonic()
        self._file_stats: frozenset[tuple[str, int, int]] = frozenset()
        self._unchanged_s = 0.0

    def is_over(self) -> bool:
        """Whether no file has changed for limit_s seconds. May be called often: files are read only when a check is due."""
        since_s = time.monotonic() - self._last_check_s
        if since_s < self._interval_s:
            return False
        self._last_check_s += since_s
        if self._has_changed(ask=False):
            return False
        # If much more time than expected has passed, this process itself was stopped (the job was suspended, or the machine
        # slept). The ranks were stopped too, so this time does not count.
        self._unchanged_s += min(since_s, 2 * self._interval_s)
        # A shared file system may report old attributes of a file for a minute. Opening the file fetches current attributes.
        return self._unchanged_s >= self._limit_s and not self._has_changed(ask=True)

    def why(self) -> str:
        """Why the run was ended, as a sentence that names the ranks that made the fewest steps."""
        ranks = range(self._folder.read_run().cell.gpus)
        last_records = {rank: records[-1] for rank in ranks if (records := self._folder.steps(rank).records)}
        stacks = "the stacks of the ranks are in log/rank-*.log"
        return f"no progress for {self._limit_s:g} s (hang_limit): {_describe_late_ranks(last_records, ranks)}; {stacks}"

    def _has_changed(self, *, ask: bool) -> bool:
        file_stats = frozenset(scan_files(self._folder.path, ask=ask))
        has_changed = file_stats != self._file_stats
        if has_changed:
            self._file_stats, self._unchanged_s = file_stats, 0.0
        return has_changed


def scan_files(folder: Path, *, ask: bool) -> Iterator[tuple[str, int, int]]:
    """Yields (path, size in bytes, time of the last change in ns) for each file in the folder that shows progress.

    folder: the run's folder or a folder in it. ask: open each file before its attributes are read, because a shared file system
    may otherwise report old attributes.
    """
    # Errors are ignored: a checkpoint may be removed while it is read, and a short failure of the disk must not end a run.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in NO_PROGRESS:
                        yield from scan_files(Path(entry.path), ask=ask)
                    continue
                if ask:
                    os.close(os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
                status = Path(entry.path).lstat()
                yield entry.path, status.st_size, status.st_mtime_ns


def _describe_late_ranks(last_records: dict[int, StepRecord], ranks: Sequence[int]) -> str:
    """A clause that names the ranks that made the fewest steps, and the step that the other ranks reached.

    last_records: the last step record of each rank that made a step, by rank. ranks: all ranks of the run.
    """
    if not last_records:
        return "no rank has made a step"
    if ranks_without_step := [rank for rank in ranks if rank not in last_records]:
        reached = _describe_step(max(last_records.values(), key=_progress_key))
        return f"{_name_ranks(ranks_without_step)} made no step, the others reached {reached}"
    lowest = min(_progress_key(record) for record in last_records.values())
    late = [rank for rank, record in last_records.items() if _progress_key(record) == lowest]
    reached_at = datetime.fromtimestamp(max(last_records[rank].wall_s for rank in late), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if len(late) == len(last_records):
        return f"{_name_ranks(late)} reached {_describe_step(last_records[late[0]])}, at {reached_at}"
    late_clause = f"{_name_ranks(late)} reached only {_describe_step(last_records[late[0]])}, at {reached_at}"
    return f"{late_clause}; the others reached {_describe_step(max(last_records.values(), key=_progress_key))}"


def _progress_key(record: StepRecord) -> tuple[bool, int]:
    return not record.warmup, record.step


def _describe_step(record: StepRecord) -> str:
    return f"step {record.step}{' of the warm-up' * record.warmup}"


def _name_ranks(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:MOST_RANKS])) + (f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
