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
IGNORED_FOLDERS = ("log", "samples", "claim")
# The time between two checks is the share INTERVAL_SHARE of the hang limit, but at least LEAST_INTERVAL_S and at most
# MOST_INTERVAL_S seconds. A check is not cheap: it reads the attributes of every file of the run.
INTERVAL_SHARE, LEAST_INTERVAL_S, MOST_INTERVAL_S = 1 / 60, 1.0, 30.0
MOST_NAMED_RANKS = 8  # the most ranks that a sentence names


class HangWatch:
    """Measures for how long no file of a run has changed. Time in which this process itself was suspended does not count."""

    def __init__(self, run_dir: RunDir, limit_s: float) -> None:
        """Start to watch a run.

        run_dir: the run's folder. limit_s: the hang limit, which is the longest allowed time in seconds without a change of a
        file. The time begins to count now, so the start of the ranks may also take limit_s seconds.
        """
        self._run_dir, self._limit_s = run_dir, limit_s
        self._interval_s = max(LEAST_INTERVAL_S, min(MOST_INTERVAL_S, INTERVAL_SHARE * limit_s))
        self._last_check_s = time.monotonic()
        self._file_stats: frozenset[tuple[str, int, int]] = frozenset()
        self._unchanged_s = 0.0

    def has_hung(self) -> bool:
        """Whether no file has changed for limit_s seconds. May be called often: files are read only when a check is due."""
        elapsed_s = time.monotonic() - self._last_check_s
        if elapsed_s < self._interval_s:
            return False
        self._last_check_s += elapsed_s
        if self._has_changed(opens_files=False):
            return False
        # If much more time than expected has passed, this process itself was stopped (the job was suspended, or the machine
        # slept). The ranks were stopped too, so this time does not count.
        self._unchanged_s += min(elapsed_s, 2 * self._interval_s)
        # A shared file system may report old attributes of a file for a minute. Opening the file fetches current attributes.
        return self._unchanged_s >= self._limit_s and not self._has_changed(opens_files=True)

    def explain_hang(self) -> str:
        """Why the run was ended, as a sentence that names the ranks that made the fewest steps."""
        ranks = range(self._run_dir.read_run().cell.gpus)
        last_records = {rank: step_records[-1] for rank in ranks if (step_records := self._run_dir.steps(rank).records)}
        stacks_clause = "the stacks of the ranks are in log/rank-*.log"
        return f"no progress for {self._limit_s:g} s (hang_limit): {_describe_late_ranks(last_records, ranks)}; {stacks_clause}"

    def _has_changed(self, *, opens_files: bool) -> bool:
        file_stats = frozenset(scan_files(self._run_dir.path, opens_files=opens_files))
        has_changed = file_stats != self._file_stats
        if has_changed:
            self._file_stats, self._unchanged_s = file_stats, 0.0
        return has_changed


def scan_files(folder: Path, *, opens_files: bool) -> Iterator[tuple[str, int, int]]:
    """Yields (path, size in bytes, time of the last change in ns) for each file in the folder that shows progress.

    folder: the run's folder or a folder in it. opens_files: open each file before its attributes are read, because a shared
    file system may otherwise report old attributes."""
    # Errors are ignored: a checkpoint may be removed while it is read, and a short failure of the disk must not end a run.
    with contextlib.suppress(OSError), os.scandir(folder) as dir_entries:
        for dir_entry in dir_entries:
            with contextlib.suppress(OSError):
                if dir_entry.is_dir(follow_symlinks=False):
                    if dir_entry.name not in IGNORED_FOLDERS:
                        yield from scan_files(Path(dir_entry.path), opens_files=opens_files)
                    continue
                if opens_files:
                    os.close(os.open(dir_entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
                file_status = Path(dir_entry.path).lstat()
                yield dir_entry.path, file_status.st_size, file_status.st_mtime_ns


def _describe_late_ranks(last_records: dict[int, StepRecord], ranks: Sequence[int]) -> str:
    """A clause that names the ranks that made the fewest steps, and the step that the other ranks reached.

    last_records: the last step record of each rank that made a step, by rank. ranks: all ranks of the run.
    """
    if not last_records:
        return "no rank has made a step"
    if ranks_without_step := [rank for rank in ranks if rank not in last_records]:
        reached_step = _describe_step(max(last_records.values(), key=_make_progress_key))
        return f"{_name_ranks(ranks_without_step)} made no step, the others reached {reached_step}"
    lowest_progress = min(_make_progress_key(record) for record in last_records.values())
    late_ranks = [rank for rank, record in last_records.items() if _make_progress_key(record) == lowest_progress]
    reached_at = datetime.fromtimestamp(max(last_records[rank].wall_s for rank in late_ranks), UTC).strftime(
        "%Y-%m-%d %H:%M:%S UTC"
    )
    if len(late_ranks) == len(last_records):
        return f"{_name_ranks(late_ranks)} reached {_describe_step(last_records[late_ranks[0]])}, at {reached_at}"
    late_clause = f"{_name_ranks(late_ranks)} reached only {_describe_step(last_records[late_ranks[0]])}, at {reached_at}"
    return f"{late_clause}; the others reached {_describe_step(max(last_records.values(), key=_make_progress_key))}"


def _make_progress_key(record: StepRecord) -> tuple[bool, int]:
    return not record.warmup, record.step


def _describe_step(record: StepRecord) -> str:
    return f"step {record.step}{' of the warm-up' * record.warmup}"


def _name_ranks(ranks: Sequence[int]) -> str:
    ranks_text = ", ".join(map(str, ranks[:MOST_NAMED_RANKS])) + (
        f" and {len(ranks) - MOST_NAMED_RANKS} more" if len(ranks) > MOST_NAMED_RANKS else ""
    )
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text}"
