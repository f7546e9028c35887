"""Detects that the ranks of a run hang: for the hang limit, no file of the run has changed except logs and telemetry."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from shardlab.record import StepRecord
from shardlab.rundir import RunDir

# Files that change without progress: logs, which get the stacks of ranks that hang, and telemetry.
NO_PROGRESS = ("log", "samples", "claim")
SHARE, LEAST_S, MOST_S = 1 / 60, 1.0, 30.0  # of limit_s between two checks; each reads the attributes of every file
SHOWN = 8  # ranks that a sentence names


class HangWatch:
    """Watches when a file of a run last changed. Times in which this process itself was stopped do not count."""

    def __init__(self, folder: RunDir, limit_s: float) -> None:
        """limit_s: how long no file may change. The time starts now: what a rank does first may take as long."""
        self._folder, self._limit_s = folder, limit_s
        self._every_s = max(LEAST_S, min(MOST_S, SHARE * limit_s))
        self._looked = time.monotonic()
        self._seen: frozenset[tuple[str, int, int]] = frozenset()
        self._still_s = 0.0

    def is_over(self) -> bool:
        """Whether no file changed for limit_s. To be called often: the files are checked only when a check is due."""
        since_s = time.monotonic() - self._looked
        if since_s < self._every_s:
            return False
        self._looked += since_s
        if self._moved(ask=False):
            return False
        # While this process stood still itself (a job that was suspended, a machine that slept), the ranks could not move.
        self._still_s += min(since_s, 2 * self._every_s)
        # A shared disk may report old attributes of a file for a minute. Opening the file gets the current ones.
        return self._still_s >= self._limit_s and not self._moved(ask=True)

    def why(self) -> str:
        """In a sentence, with the ranks that are behind."""
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
    """(path, bytes, time of the last change in ns) of each file that is progress."""
    # Checkpoints come and go, and a disk that fails for a moment must not end a run.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in NO_PROGRESS:
                        yield from files_of(Path(entry.path), ask=ask)
                    continue
                if ask:
                    os.close(os.open(entry.path, os.O_RDONLY | os.O_NONBLOCK))
                status = Path(entry.path).lstat()
                yield entry.path, status.st_size, status.st_mtime_ns


def _behind(last: dict[int, StepRecord], ranks: Sequence[int]) -> str:
    """Which ranks made the fewest steps, and how far the others came."""
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
