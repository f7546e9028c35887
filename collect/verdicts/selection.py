"""Finds the cell that a filter matches, and a metric of this cell. Raises `NoMeasurement` unless exactly one cell matches."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import msgspec

from collect.findings import columns
from collect.findings.row import CellRow
from collect.findings.statistics import Noise, pool_noise
from collect.loading.loaded_run import Quantity
from collect.metric import Argument, MeanPair, Metric, load_metrics
from collect.reading.load import LoadedCell, LoadedMatrix
from shardlab.matrix import cell_names
from shardlab.matrix.metric_names import STATE_METRIC as STATE_METRIC


class NoMeasurement(Exception):
    """Raised if a filter does not lead to a number.

    verdict: the verdict on a claim that needs this number. why: the reason, as a sentence.
    """

    def __init__(self, verdict: Literal["ambiguous", "not run", "undecided"], why: str) -> None:
        super().__init__(why)
        self.verdict = verdict
        self.why = why


class SelectedMetric(msgspec.Struct, frozen=True):
    """The values of one metric in one cell."""

    row: CellRow
    """The cell."""
    metric: Metric
    values: list[float]
    """One for each repeat, in `unit`."""
    unit: str
    kind: str = ""
    """The kind of the value, such as `cpu`."""
    argument: Argument | None = None
    """The argument of the metric, such as the name of an operator; None if the metric has none."""
    compared_pair: tuple[SelectedMetric, SelectedMetric] | None = None
    """For a metric that compares two cells, the compared metric in this cell and in the other cell (by default its baseline);
    `values` are then the values of the compared metric in this cell."""

    @property
    def mean(self) -> float:
        """The mean of the values over the repeats."""
        return statistics.fmean(self.values)

    @property
    def parts(self) -> tuple[SelectedMetric, ...]:
        """The two compared metrics if this metric compares two cells; otherwise this metric itself."""
        return self.compared_pair or (self,)


class Measurements:
    """All results of a matrix. Claims and reported numbers look up the metrics and states of cells here."""

    def __init__(self, loaded: LoadedMatrix, rows: Sequence[CellRow]) -> None:
        self.rows = list(rows)
        self.metrics = {metric.name: metric for metric in load_metrics()}
        self._cells = {cell.id: cell for cell in loaded.cells}
        self._excluded = loaded.expansion.excluded
        self._noise: dict[tuple[str, Argument | None], Noise | None] = {}

    def cell(self, row: CellRow) -> LoadedCell:
        """The cell of a row of the summary, with its runs."""
        return self._cells[row.id]

    @cached_property
    def _labels(self) -> dict[str, str]:
        return columns.map_cells_to_labels(self.rows)

    def label(self, row: CellRow) -> str:
        """The short and unique name of a row of the summary."""
        return self._labels[row.id]

    def find_row(self, cell_filter: Mapping[str, Any]) -> CellRow:
        """The one cell whose keys have these values. Raises NoMeasurement if no cell or several cells have these values."""
        matches = [row for row in self.rows if cell_names.matches_cell(row.cell, cell_filter)]
        filter_text = ", ".join(f"{key} {value}" for key, value in cell_filter.items()) or "no filter"
        if len(matches) > 1:
            raise NoMeasurement(
                "ambiguous", f"{filter_text}: matches {len(matches)} cells: {'; '.join(map(self.label, matches))}"
            )
        if matches:
            return matches[0]
        for excluded in self._excluded:
            if all(excluded.cell.get(key) == value for key, value in cell_filter.items()):
                raise NoMeasurement("not run", f"{filter_text}: excluded: {excluded.why}")
        raise NoMeasurement("not run", f"{filter_text}: no such cell in this matrix")

    def find_state(self, cell_filter: Mapping[str, Any]) -> tuple[CellRow, str]:
        """The one cell whose keys have these values, and its state, such as completed or oom.

        Raises NoMeasurement if the cell has not ended, if its repeats ended in different states, or if its runs were tiny
        twins, which have too little data to run out of memory or time.
        """
        row = self.find_row(cell_filter)
        if self.cell(row).cell.rehearses is not None:
            raise NoMeasurement("not run", f"{self.label(row)}: how its tiny twin ended does not say how the cell itself ends")
        unfinished_states = [state for state in row.states if state in ("planned", "pending", "running", "unknown")]
        if unfinished_states or not row.states:
            raise NoMeasurement("not run", f"{self.label(row)}: {row.state or 'planned'}")
        if len(row.states) > 1:
            raise NoMeasurement("undecided", f"{self.label(row)}: {row.state}")
        return row, row.state

    def find_metric(
        self,
        name: str,
        cell_filter: Mapping[str, Any],
        argument: Argument | None = None,
        against: Mapping[str, Any] | None = None,
    ) -> SelectedMetric:
        """The values of a metric in the one cell that matches a filter.

        name: the name of the metric. cell_filter: the filter. argument: the argument of the metric, if it needs one.
        against: for a metric that compares two cells, the filter of the cell to compare with; None for the baseline.
        Raises NoMeasurement if the metric was not measured in this cell.
        """
        metric = self.metrics.get(name)
        if metric is None:
            raise NoMeasurement("not run", f"{name} is not a metric")
        row = self.find_row(cell_filter)
        if metric.of_cells is not None:
            return self._select_comparison(metric, row, argument, self.find_row(against) if against else None)
        return self.select_measured(metric, row, argument)

    def find_noise(self, metric: Metric, argument: Argument | None = None) -> Noise | None:
        """The scatter of a metric over repeats, pooled over all cells that have several repeats; None if no cell has several
        repeats."""
        metric_and_argument = (metric.name, argument)
        if metric_and_argument not in self._noise:
            if metric.of_run_at is None:
                values_of_cells = [
                    [run.metrics[metric.name] for run in row.runs if metric.name in run.metrics] for row in self.rows
                ]
            else:
                values_of_cells = [
                    [entry.value for entry in self._compute_quantities(metric, row, argument) if entry] for row in self.rows
                ]
            self._noise[metric_and_argument] = pool_noise(values_of_cells)
        return self._noise[metric_and_argument]

    def compare_values(self, selected: SelectedMetric, value: float, other_value: float) -> float | None:
        """The result of a metric that compares two cells, computed from one value of each cell; None if the result is
        undefined.

        value: the value of the cell. other_value: the value of the other cell.
        """
        assert selected.compared_pair is not None
        quantity = self._apply_formula(selected.metric, *selected.compared_pair, value, other_value)
        return None if quantity is None else quantity.value

    def _select_comparison(
        self, metric: Metric, row: CellRow, argument: Argument | None, row_to_compare: CellRow | None
    ) -> SelectedMetric:
        other_row = row_to_compare or next((entry for entry in self.rows if entry.id == row.baseline), None)
        # a cell that does other work has no baseline with which it could be compared
        if other_work_rows := [entry for entry in (row, other_row) if entry and entry.does_other_work]:
            proof_texts = "; ".join(
                f"{self.label(entry)}: {entry.same_work.verdict} ({entry.same_work.why})"
                for entry in other_work_rows
                if entry.same_work
            )
            raise NoMeasurement("undecided", f"not compared, because the cells do not do the same work: {proof_texts}")
        if other_row is None:
            raise self._explain_no_measurement(metric, row, ": no baseline" if row.n else "")
        compared_metric = self.metrics[metric.compares]
        selected, other_selected = (self.select_measured(compared_metric, entry, argument) for entry in (row, other_row))
        if (selected.unit, selected.kind) != (other_selected.unit, other_selected.kind):
            kinds_text = " and ".join(
                f"{self.label(entry.row)} ({entry.kind or entry.unit})" for entry in (selected, other_selected)
            )
            raise NoMeasurement("not run", f"{metric.name}: {kinds_text} are not comparable")
        quantity = self._apply_formula(metric, selected, other_selected, selected.mean, other_selected.mean)
        if quantity is None:
            raise self._explain_no_measurement(metric, row)
        return SelectedMetric(row, metric, selected.values, quantity.unit, quantity.kind, argument, (selected, other_selected))

    def _apply_formula(
        self, metric: Metric, selected: SelectedMetric, other_selected: SelectedMetric, value: float, other_value: float
    ) -> Quantity | None:
        assert metric.of_cells is not None
        return metric.of_cells(MeanPair(self.cell(selected.row).cell, value, self.cell(other_selected.row).cell, other_value))

    def select_measured(self, metric: Metric, row: CellRow, argument: Argument | None = None) -> SelectedMetric:
        """The values of a metric that does not compare cells, in one cell. Raises NoMeasurement if it was not measured."""
        if metric.of_run_at is not None:
            return self._select_with_argument(metric, row, argument)
        estimate = row.metrics.get(metric.name)
        if estimate is None:
            raise self._explain_no_measurement(metric, row)
        values = [run.metrics[metric.name] for run in row.runs if metric.name in run.metrics]
        return SelectedMetric(row, metric, values, estimate.unit, estimate.kind)

    def _select_with_argument(self, metric: Metric, row: CellRow, argument: Argument | None) -> SelectedMetric:
        if not isinstance(argument, str if isinstance(metric.example, str) else int | float):
            raise NoMeasurement(
                "not run", f"{metric.name} needs {metric.argument}, such as {metric.argument}={metric.example!r}"
            )
        quantities_or_none = self._compute_quantities(metric, row, argument)
        known_quantities: list[Quantity] = [entry for entry in quantities_or_none if entry is not None]
        if not known_quantities or len(known_quantities) < len(quantities_or_none):
            raise self._explain_no_measurement(
                metric,
                row,
                f" ({len(known_quantities)} of {len(quantities_or_none)} repeats have one)" if known_quantities else "",
            )
        if len({(entry.unit, entry.kind) for entry in known_quantities}) > 1:
            raise self._explain_no_measurement(metric, row, " in the same way in all repeats")
        return SelectedMetric(
            row,
            metric,
            [entry.value for entry in known_quantities],
            known_quantities[0].unit,
            known_quantities[0].kind,
            argument,
        )

    def _compute_quantities(self, metric: Metric, row: CellRow, argument: Argument | None) -> list[Quantity | None]:
        assert metric.of_run_at is not None
        return [metric.of_run_at(run, argument) for run in self.cell(row).completed_runs]

    def _explain_no_measurement(self, metric: Metric, row: CellRow, suffix: str = "") -> NoMeasurement:
        if not row.n:
            return NoMeasurement("not run", f"{self.label(row)}: {row.state or 'planned'}")
        return NoMeasurement("not run", f"{self.label(row)}: {metric.name} was not measured{suffix}")
