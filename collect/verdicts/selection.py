"""Which cell a filter means, and what it came to there; several or none is an answer of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import msgspec

from collect import columns
from collect.load import Loaded, LoadedCell
from collect.metric import Compared, Metric, Quantity, menu
from collect.row import Row
from collect.statistics import Noise, noise
from shardlab import cell_names

STATE = "state"  # in claims and reported entries: how the cell ended


class Unanswered(Exception):
    """A filter that leads to no number: ambiguous, or not run."""

    def __init__(self, verdict: Literal["ambiguous", "not run", "undecided"], why: str) -> None:
        super().__init__(why)
        self.verdict = verdict
        self.why = why


class Found(msgspec.Struct, frozen=True):
    """The repeats of one metric in one cell. against: the same of its baseline, for a metric that sets the two side by side."""

    row: Row
    metric: Metric
    values: list[float]
    unit: str
    kind: str = ""
    against: Found | None = None


class Measurements:
    """All that a matrix came to, as claims and reported numbers ask for it."""

    def __init__(self, loaded: Loaded, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.metrics = {metric.name: metric for metric in menu()}
        self._cells = {cell.id: cell for cell in loaded.cells}
        self._excluded = loaded.expansion.excluded
        self._noise: dict[str, Noise | None] = {}

    def cell(self, row: Row) -> LoadedCell:
        return self._cells[row.id]

    @cached_property
    def _labels(self) -> dict[str, str]:
        return dict(zip((row.id for row in self.rows), columns.labels(self.rows), strict=True))

    def label(self, row: Row) -> str:
        return self._labels[row.id]

    def row(self, wanted: Mapping[str, Any]) -> Row:
        """The one cell with these values. Raises Unanswered where several have them, or none."""
        matching = [row for row in self.rows if cell_names.matches(row.cell, wanted)]
        said = ", ".join(f"{key} {value}" for key, value in wanted.items()) or "no filter"
        if len(matching) > 1:
            raise Unanswered("ambiguous", f"{said}: {len(matching)} cells: {'; '.join(map(self.label, matching))}")
        if matching:
            return matching[0]
        for excluded in self._excluded:
            if all(excluded.get("cell", {}).get(key) == value for key, value in wanted.items()):
                raise Unanswered("not run", f"{said}: excluded: {excluded.get('why')}")
        raise Unanswered("not run", f"{said}: no such cell in this matrix")

    def state(self, wanted: Mapping[str, Any]) -> tuple[Row, str]:
        """How the one cell that is meant ended. Raises Unanswered where it did not, or not always in one way."""
        row = self.row(wanted)
        going = [state for state in row.states if state in ("planned", "pending", "running", "unknown")]
        if going or not row.states:
            raise Unanswered("not run", f"{self.label(row)}: {row.state or 'planned'}")
        if len(row.states) > 1:
            raise Unanswered("undecided", f"{self.label(row)}: {row.state}")
        return row, row.state

    def find(self, name: str, wanted: Mapping[str, Any], argument: float | None = None) -> Found:
        """A metric in the one cell that is meant. Raises Unanswered where it has none there."""
        metric = self.metrics.get(name)
        if metric is None:
            raise Unanswered("not run", f"{name} is no metric")
        row = self.row(wanted)
        if metric.of_cells is not None:
            return self._beside_baseline(metric, row)
        if metric.of_run_at is not None:
            return self._at(metric, row, argument)
        estimate = row.metrics.get(name)
        if estimate is None:
            raise self._unmeasured(metric, row)
        values = [run.metrics[name] for run in row.runs if name in run.metrics]
        return Found(row, metric, values, estimate.unit, estimate.kind)

    def noise(self, metric: Metric) -> Noise | None:
        """How much this metric scatters over the repeats of all cells that were repeated."""
        if metric.name not in self._noise:
            repeats = [[run.metrics[metric.name] for run in row.runs if metric.name in run.metrics] for row in self.rows]
            self._noise[metric.name] = noise(repeats)
        return self._noise[metric.name]

    def compared(self, found: Found, value: float, against: float) -> float | None:
        """What a metric that sets a cell beside its baseline makes of two throughputs."""
        assert found.metric.of_cells is not None
        assert found.against is not None
        cell, baseline = self.cell(found.row).cell, self.cell(found.against.row).cell
        quantity = found.metric.of_cells(Compared(cell, value, baseline, against))
        return None if quantity is None else quantity.value

    def _beside_baseline(self, metric: Metric, row: Row) -> Found:
        estimate = row.metrics.get(metric.name)
        if estimate is None or row.baseline is None:
            raise self._unmeasured(metric, row)
        baseline = next(other for other in self.rows if other.id == row.baseline)
        throughput = self.metrics["throughput_per_s"]
        mine, theirs = (
            Found(one, throughput, [run.metrics[throughput.name] for run in one.runs if throughput.name in run.metrics], "")
            for one in (row, baseline)
        )
        return Found(row, metric, mine.values, estimate.unit, estimate.kind, theirs)

    def _at(self, metric: Metric, row: Row, argument: float | None) -> Found:
        if argument is None:
            raise Unanswered("not run", f"{metric.name} needs {metric.argument}, such as {metric.argument}=75")
        assert metric.of_run_at is not None
        cell = self.cell(row)
        asked = [metric.of_run_at(cell.measured(run), argument) for run in cell.completed]
        known: list[Quantity] = [quantity for quantity in asked if quantity is not None]
        if not known or len(known) < len(asked):
            raise self._unmeasured(metric, row, f" ({len(known)} of {len(asked)} repeats have one)" if known else "")
        return Found(row, metric, [quantity.value for quantity in known], known[0].unit)

    def _unmeasured(self, metric: Metric, row: Row, more: str = "") -> Unanswered:
        if not row.n:
            return Unanswered("not run", f"{self.label(row)}: {row.state or 'planned'}")
        return Unanswered("not run", f"{self.label(row)}: {metric.name} was not measured{more}")
