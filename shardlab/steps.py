"""Lets a training script tell its steps to shardlab: `from shardlab.steps import report`.

    report(step=3, loss=2.7, tokens=8192)

Outside of a run of shardlab, `report` does nothing, so the script stays the same. This module needs only Python's library. The
time of a step is the time since the call before, unless the script gives it. Reading a loss that is a tensor waits for the GPU,
so it is read only at every READ_EVERY-th step, after the script's own work of that step.

`checksum(model)` writes checksums of the weights, by which shardlab compares strategies; only this function needs torch.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

READ_EVERY = 10  # a tensor is read at each step whose number is divisible by this
FOLDER_VARIABLE = "SHARDLAB_STEPS"  # the folder into which the ranks of a run write their steps; shardlab sets it
WARMUP_VARIABLE = "SHARDLAB_WARMUP_STEPS"  # the number of first steps that are not timed; shardlab sets it
CHECKSUMS_VARIABLE = "SHARDLAB_CHECKSUMS"  # the folder into which the ranks of a run write checksums; shardlab sets it
_SCHEMA = 1
_IMPORTED_S = time.monotonic()


class _Reporter:
    """Writes the steps of this process, a line for each."""

    def __init__(self, folder: str) -> None:
        rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
        steps_path = Path(folder) / f"rank-{rank:05d}.jsonl"
        self._descriptor = os.open(steps_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # Of a script that does not count its data, the step is the unit, once for all ranks.
        self._default_units = int(rank == 0)
        self._last_report_s, self._is_first = _IMPORTED_S, True
        self.last_step, self.is_watched = 0, False
        self._warmup_left = int(os.environ.get(WARMUP_VARIABLE, "0"))

    def write_step(self, step: int, loss: Any, tokens: int | None, seconds: float | None) -> None:
        """Write the record of a step. Without `seconds`, the time of the first step includes the start of the script, so it
        counts as a warm-up step."""
        now_s, wall_s = time.monotonic(), time.time()
        elapsed_s = now_s - self._last_report_s if seconds is None else seconds
        loss_number = _read_loss(loss, step)
        units = self._default_units if tokens is None else tokens
        record: dict[str, Any] = {
            "schema": _SCHEMA, "step": step, "t_s": now_s, "wall_s": wall_s, "units": units, "step_ms": 1000 * elapsed_s,
            "counts_units": tokens is not None,
        }  # fmt: skip
        if loss_number is not None:
            record |= {"loss": loss_number} if math.isfinite(loss_number) else {"diverged": True}
        if self._warmup_left > 0 or (seconds is None and self._is_first):
            record["warmup"] = True
        if self.is_watched:
            record["watched"] = True
        self._last_report_s, self._is_first, self._warmup_left = now_s, False, self._warmup_left - 1
        self.last_step, self.is_watched = step, False
        os.write(self._descriptor, json.dumps(record).encode() + b"\n")


_reporter: _Reporter | None = None


def report(*, step: int, loss: Any = None, tokens: int | None = None, seconds: float | None = None) -> None:
    """Tell shardlab that this rank has finished a step. Outside of a run of shardlab, nothing happens.

    step: the number of the step, which grows from call to call. loss: a number, or a tensor with one number. tokens: the units
    of data of this rank in this step. seconds: the time of the step; None: the time since the call before.
    """
    if (reporter := _find_reporter()) is not None:
        reporter.write_step(step, loss, tokens, seconds)


def checksum(model: Any, *, optimizer: Any = None, step: int | None = None) -> None:
    """Write checksums of the weights, and of the gradients that are still there, of this rank's part of a model. No rank sends
    anything, and the step after it does not count for times. Outside of a run of shardlab, nothing happens.

    Call it before the first step and after a later step, on all ranks. model: as it trains, with its wrapper. optimizer: its
    class is put on record. step: the number of steps before; None: that of the last report, 0 if there was none.
    """
    folder = os.environ.get(CHECKSUMS_VARIABLE)
    if folder is None:
        return
    from shardlab.weights import checksums  # needs torch, which a script with a model has

    reporter = _find_reporter()
    last_step = reporter.last_step if reporter is not None else 0
    checksums.write_checksums(Path(folder), model, optimizer, last_step if step is None else step)
    if reporter is not None:
        reporter.is_watched = True


def _find_reporter() -> _Reporter | None:
    """What writes the steps of this process; None outside of a run, or if shardlab finds the steps in the script's output."""
    global _reporter
    if _reporter is None and (folder := os.environ.get(FOLDER_VARIABLE)) is not None:
        _reporter = _Reporter(folder)
    return _reporter


def _read_loss(loss: Any, step: int) -> float | None:
    """A loss as a number; None if it is not given, or a tensor that is not read at this step."""
    if loss is None or isinstance(loss, int | float):
        return loss
    return float(loss) if step % READ_EVERY == 0 else None
