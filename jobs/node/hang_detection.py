"""Detects that the ranks of a run hang.

A run hangs if none of its files, except logs and telemetry, has changed for the time of its hang limit.
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
# The time between two checks is the share SHARE of the hang limit, but at least LEAST_S and at most MOST_S seconds. A check is
# not cheap: it reads the attributes of every file of the run.
SHARE, LEAST_S, MOST_S = 1 / 60, 1.0, 30.0
SHOWN = 8  # the most ranks that a sentence names


class HangWatch:
    """Measures for how long no file of a run has changed. Time in which this process itself was suspended does not count."""

    def __init__(self, folder: RunDir, limit_s: float) -> None:
        """Start to watch a run.

        folder: the run's folder. limit_s: the hang limit, which is the longest allowed time in seconds without a change of a
        file. The time begins to count now, so the start of the ranks may also take limit_s seconds.
        """
        self._folder, self._limit_s = folder, limit_s
        self._every_s = max(LEAST_S, min(MOST_S, SHARE * limit_s))
        self._looked = time.monotonic()
        self._seen: frozenset[tuple[str, int, int]] = frozenset()
        self._still_s = 0.0

    def is_over(self) -> bool:
        """Whether no file has changed for limit_s seconds. May be called often: files are read only when a check is due."""
        since_s = time.monotonic() - self._looked
        if since_s < self._every_s:
            return False
        self._looked += since_s
        if self._moved(ask=False):
            return False
        # If much more time than expected has passed, this process itself was stopped (the job was suspended, or the machine
        # slept). The ranks were stopped too, so this time does not count.
        self._still_s += min(since_s, 2 * self._every_s)
        # A shared file system may report old attributes of a file for a minute. Opening the file fetches current attributes.
        return self._still_s >= self._limit_s and not self._moved(ask=True)

    def why(self) -> str:
        """Why the run was ended, as a sentence that names the ranks that made the fewest steps."""
        ranks = range(self._folder.read_run().cell.gpus)
        last = {rank: records[-1] for rank in ranks if (records := self._folder.steps(rank).records)}
        stacks = "the stacks of the ranks are in log/rank-*.log"
        return f"no progress for {self._limit_s:g} s (hang_limit): {_behind(last, ranks)}; {stacks}"

    def _moved(self, *, ask: bool) -> bool:
        now = frozenset(files_of(self._folder.path, ask=ask))
        moved = now != self._seen
        if moved:
            self._seen, self._still_s = now, 0.0
        return moved


def files_of(folder: Path, *, ask: bool) -> Iterator[tuple[str, int, int]]:
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
                        yield from files_of(Path(entry.path), ask=ask)
                    continue
                if ask:
                    os.close(os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
                status = Path(entry.path).lstat()
                yield entry.path, status.st_size, status.st_mtime_ns


def _behind(last: dict[int, StepRecord], ranks: Sequence[int]) -> str:
    """A clause that names the ranks that made the fewest steps, and the step that the other ranks reached.

    last: the last step record of each rank that made a step, by rank. ranks: all ranks of the run.
    """
    if not last:
        return "no rank has made a step"
    if missing := [rank for rank in ranks if rank not in last]:
        return f"{_named(missing)} made no step, the others reached {_step(max(last.values(), key=_order))}"
    first = min(_order(record) for record in last.values())
    late = [rank for rank, record in last.items() if _order(record) == first]
    at = datetime.fromtimestamp(max(last[rank].wall_s for rank in late), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if len(late) == len(last):
        return f"{_named(late)} reached {_step(last[late[0]])}, at {at}"
    said = f"{_named(late)} reached only {_step(last[late[0]])}, at {at}"
    return f"{said}; the others reached {_step(max(last.values(), key=_order))}"


def _order(record: StepRecord) -> tuple[bool, int]:
    return not record.warmup, record.step


def _step(record: StepRecord) -> str:
    return f"step {record.step}{' of the warm-up' * record.warmup}"


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN])) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
