"""Defines a row of the summary: the metrics of a cell over all its repeats, and the metrics of each of its runs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from collect.findings.statistics import Estimate
from shardlab.matrix import faults
from shardlab.matrix.command import mark_label
from shardlab.runs.record import SameWork


class RunRow(msgspec.Struct):
    """A run and its metrics: {name: value} in the units that the row of the cell gives."""

    run_id: str
    repeat: int
    """Number of the repeat, from 1."""
    attempt: int
    """Number of the attempt, from 1."""
    state: str
    why: str
    metrics: dict[str, float]
    """Name of a metric -> its value."""
    gpu_trouble: str = ""
    """Which GPUs of the run were shared, throttled or faulty, and why; '' if none."""


def flatten_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell with flat keys: the parts of a nested key are joined with a dot (`optimizer.name`), as a matrix file may write
    them. Faults on purpose are one key, `fault`, with all of them in words; without a fault, the key is absent. An imported
    cell has only the keys that are its labels."""
    if cell.get("imported"):  # the logs state no other keys
        return {key: cell[key] for key in ("workload", "strategy", "gpus", "imported") if key in cell}
    flat_cell: dict[str, Any] = {}
    for key, value in cell.items():
        if key == "command":  # its words differ where a value differs that has a key of its own
            continue
        inner_values = {f"{key}.{inner_key}": item for inner_key, item in value.items()} if isinstance(value, dict) else None
        flat_cell |= {key: value} if inner_values is None else inner_values
    fault_text = faults.describe_faults(cell.get("instruments") or {})
    for name in ("straggler", "lost_worker"):
        flat_cell.pop(f"instruments.{name}", None)
    if cell.get("command") is not None and "strategy" in flat_cell:
        flat_cell["strategy"] = mark_label(flat_cell["strategy"])
    return flat_cell | ({"fault": fault_text} if fault_text else {})


class CellRow(msgspec.Struct, dict=True):
    """A cell with its metrics over all completed repeats."""

    id: str
    """Id of the cell."""
    cell: dict[str, Any]
    """The resolved cell, in its plain form (dicts and lists)."""
    n: int
    """Number of completed repeats."""
    states: dict[str, int]
    """State -> number of repeats in this state."""
    expected: bool
    """Whether every repeat completed, or ended in a state that the cell expects."""
    same_work: SameWork | None
    """The result of the same-work proof, from the first run that has a result."""
    baseline: str | None
    """The id of the cell with which this cell is compared, e.g. for its speed-up."""
    metrics: dict[str, Estimate]
    """Name of a metric -> its mean over completed repeats."""
    runs: list[RunRow]
    """The latest attempt of each repeat."""
    handle: str = ""
    """The short name of the cell, such as c3, which the verbs accept; '' if the matrix as submitted last does not have it."""

    @cached_property
    def flat_cell(self) -> dict[str, Any]:
        """The cell with flat keys (`optimizer.name`). It is computed once and kept, because every table needs it."""
        return flatten_cell(self.cell)

    @property
    def is_ranked(self) -> bool:
        """Whether the cell may be ranked among other cells.

        Its GPUs must have been neither shared nor throttled. The same-work proof must have shown that the cell does the same
        work as one process; if such a proof is not possible for the cell, the cell is ranked without it.
        """
        return not self.gpu_trouble and self.same_work is not None and self.same_work.verdict in ("proven", "not provable")

    @cached_property
    def gpu_trouble(self) -> str:
        """A text that names the runs whose GPUs were shared, throttled or faulty, with the GPUs and the reasons; '' if there
        are none."""
        return "; ".join(f"{run.run_id}: {run.gpu_trouble}" for run in self.runs if run.gpu_trouble)

    @property
    def does_other_work(self) -> bool:
        """Whether the cell is known to do other work than one process: by design, or because the same-work proof failed."""
        return self.same_work is not None and self.same_work.verdict in ("different", "other work")

    @property
    def state(self) -> str:
        """The states of the repeats in words: `completed`, or `2 completed, 1 failed`."""
        if len(self.states) == 1:
            return next(iter(self.states))
        return ", ".join(f"{count} {state}" for state, count in self.states.items())
