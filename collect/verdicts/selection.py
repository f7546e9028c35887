"""Finds the cell that a filter matches, and a metric of this cell. Raises `NoMeasurement` unless exactly one cell matches."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import msgspec

from collect.findings import columns
from collect.findings.row import CellRow
from collect.findings.statistics import Noise, noise
from collect.loading.loaded_run import Quantity
from collect.metric import Argument, Compared, Metric, menu
from collect.reading.load import Loaded, LoadedCell
from shardlab.matrix import cell_names
from shardlab.matrix.metric_names import STATE as STATE


class NoMeasurement(Exception):
    """Raised if a filter does not lead to a number.

    verdict: the verdict on a claim that needs this number. why: the reason, as a sentence.
    """

    def __init__(self, verdict: Literal["ambiguous", "not run", "undecided"], why: str) -> None:
        super().__init__(why)
        self.verdict = verdict
        self.why = why


class SelectedMetric(msgspec.Struct, frozen=True):
    """The values of one metric in one cell.

    row: the cell. values: one for each repeat, in `unit`. kind: the kind of the value, such as `cpu`.
    argument: the argument of the metric, such as the name of an operator; None if the metric has none.
    beside: for a metric that compares two cells, the compared metric in this cell and in the other cell (by default its
    baseline); `values` are then the values of the compared metric in this cell.
    """

    row: CellRow
    metric: Metric
    values: list[float]
    unit: str
    kind: str = ""
    argument: Argument | None = None
    beside: tuple[SelectedMetric, SelectedMetric] | None = None

    @property
    def mean(self) -> float:
        """The mean of the values over the repeats."""
        return statistics.fmean(self.values)

    @property
    def parts(self) -> tuple[SelectedMetric, ...]:
        """The two compared metrics if this metric compares two cells; otherwise this metric itself."""
        return self.beside or (self,)


class Measurements:
    """All results of a matrix. Claims and reported numbers look up the metrics and states of cells here."""

    def __init__(self, loaded: Loaded, rows: Sequence[CellRow]) -> None:
        self.rows = list(rows)
        self.metrics = {metric.name: metric for metric in menu()}
        self._cells = {cell.id: cell for cell in loaded.cells}
        self._excluded = loaded.expansion.excluded
        self._noise: dict[tuple[str, Argument | None], Noise | None] = {}

    def cell(self, row: CellRow) -> LoadedCell:
        """The cell of a row of the summary, with its runs."""
        return self._cells[row.id]

    @cached_property
    def _labels(self) -> dict[str, str]:
        return columns.label_of(self.rows)

    def label(self, row: CellRow) -> str:
        """The short and unique name of a row of the summary."""
        return self._labels[row.id]

    def row(self, wanted: Mapping[str, Any]) -> CellRow:
        """The one cell whose keys have these values. Raises NoMeasurement if no cell or several cells have these values."""
        matching = [row for row in self.rows if cell_names.matches(row.cell, wanted)]
        said = ", ".join(f"{key} {value}" for key, value in wanted.items()) or "no filter"
        if len(matching) > 1:
            raise NoMeasurement("ambiguous", f"{said}: matches {len(matching)} cells: {'; '.join(map(self.label, matching))}")
        if matching:
            return matching[0]
        for excluded in self._excluded:
            if all(excluded.cell.get(key) == value for key, value in wanted.items()):
                raise NoMeasurement("not run", f"{said}: excluded: {excluded.why}")
        raise NoMeasurement("not run", f"{said}: no such cell in this matrix")

    def state(self, wanted: Mapping[str, Any]) -> tuple[CellRow, str]:
        """The one cell whose keys have these values, and its state, such as completed or oom.

        Raises NoMeasurement if the cell has not ended, or if its repeats ended in different states.
        """
        row = self.row(wanted)
        going = [state for state in row.states if state in ("planned", "pending", "running", "unknown")]
        if going or not row.states:
            raise NoMeasurement("not run", f"{self.label(row)}: {row.state or 'planned'}")
        if len(row.states) > 1:
            raise NoMeasurement("undecided", f"{self.label(row)}: {row.state}")
        return row, row.state

    def find(
        self,
        name: str,
        wanted: Mapping[str, Any],
        argument: Argument | None = None,
        against: Mapping[str, Any] | None = None,
    ) -> SelectedMetric:
        """The values of a metric in the one cell that matches a filter.

        name: the name of the metric. wanted: the filter. argument: the argument of the metric, if it needs one.
        against: for a metric that compares two cells, the filter of the cell to compare with; None for the baseline.
        Raises NoMeasurement if the metric was not measured in this cell.
        """
        metric = self.metrics.get(name)
        if metric is None:
            raise NoMeasurement("not run", f"{name} is not a metric")
        row = self.row(wanted)
        if metric.of_cells is not None:
            return self._compare(metric, row, argument, self.row(against) if against else None)
        return self._measured(metric, row, argument)

    def noise(self, metric: Metric, argument: Argument | None = None) -> Noise | None:
        """The scatter of a metric over repeats, pooled over all cells that have several repeats; None if no cell has several
        repeats."""
        key = (metric.name, argument)
        if key not in self._noise:
            if metric.of_run_at is None:
                repeats = [[run.metrics[metric.name] for run in row.runs if metric.name in run.metrics] for row in self.rows]
            else:
                repeats = [[found.value for found in self._of_repeats(metric, row, argument) if found] for row in self.rows]
            self._noise[key] = noise(repeats)
        return self._noise[key]

    def compared(self, found: SelectedMetric, value: float, against: float) -> float | None:
        """The result of a metric that compares two cells, computed from one value of each cell; None if the result is
        undefined.

        value: the value of the cell. against: the value of the other cell.
        """
        assert found.beside is not None
        quantity = self._set_beside(found.metric, *found.beside, value, against)
        return None if quantity is None else quantity.value

    def _compare(self, metric: Metric, row: CellRow, argument: Argument | None, against: CellRow | None) -> SelectedMetric:
        other = against or next((one for one in self.rows if one.id == row.baseline), None)
        if different := [
            one for one in (row, other) if one and one.does_other_work
        ]:  # a cell that does other work has no baseline with which it could be compared
            said = "; ".join(
                f"{self.label(one)}: {one.same_work.verdict} ({one.same_work.why})" for one in different if one.same_work
            )
            raise NoMeasurement("undecided", f"not compared, because the cells do not do the same work: {said}")
        if other is None:
            raise self._unmeasured(metric, row, ": no baseline" if row.n else "")
        of = self.metrics[metric.compares]
        mine, theirs = (self._measured(of, one, argument) for one in (row, other))
        if (mine.unit, mine.kind) != (theirs.unit, theirs.kind):
            kinds = " and ".join(f"{self.label(one.row)} ({one.kind or one.unit})" for one in (mine, theirs))
            raise NoMeasurement("not run", f"{metric.name}: {kinds} are not comparable")
        quantity = self._set_beside(metric, mine, theirs, mine.mean, theirs.mean)
        if quantity is None:
            raise self._unmeasured(metric, row)
        return SelectedMetric(row, metric, mine.values, quantity.unit, quantity.kind, argument, (mine, theirs))

    def _set_beside(
        self, metric: Metric, mine: SelectedMetric, theirs: SelectedMetric, value: float, against: float
    ) -> Quantity | None:
        assert metric.of_cells is not None
        return metric.of_cells(Compared(self.cell(mine.row).cell, value, self.cell(theirs.row).cell, against))

    def _measured(self, metric: Metric, row: CellRow, argument: Argument | None) -> SelectedMetric:
        if metric.of_run_at is not None:
            return self._at(metric, row, argument)
        estimate = row.metrics.get(metric.name)
        if estimate is None:
            raise self._unmeasured(metric, row)
        values = [run.metrics[metric.name] for run in row.runs if metric.name in run.metrics]
        return SelectedMetric(row, metric, values, estimate.unit, estimate.kind)

    def _at(self, metric: Metric, row: CellRow, argument: Argument | None) -> SelectedMetric:
        if not isinstance(argument, str if isinstance(metric.example, str) else int | float):
            raise NoMeasurement(
                "not run", f"{metric.name} needs {metric.argument}, such as {metric.argument}={metric.example!r}"
            )
        asked = self._of_repeats(metric, row, argument)
        known: list[Quantity] = [quantity for quantity in asked if quantity is not None]
        if not known or len(known) < len(asked):
            raise self._unmeasured(metric, row, f" ({len(known)} of {len(asked)} repeats have one)" if known else "")
        if len({(quantity.unit, quantity.kind) for quantity in known}) > 1:
            raise self._unmeasured(metric, row, " in the same way in all repeats")
        return SelectedMetric(row, metric, [quantity.value for quantity in known], known[0].unit, known[0].kind, argument)

    def _of_repeats(self, metric: Metric, row: CellRow, argument: Argument | None) -> list[Quantity | None]:
        assert metric.of_run_at is not None
        return [metric.of_run_at(run, argument) for run in self.cell(row).completed]

    def _unmeasured(self, metric: Metric, row: CellRow, more: str = "") -> NoMeasurement:
        if not row.n:
            return NoMeasurement("not run", f"{self.label(row)}: {row.state or 'planned'}")
        return NoMeasurement("not run", f"{self.label(row)}: {metric.name} was not measured{more}")
