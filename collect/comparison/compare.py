"""Compares every metric of the cells that are in both of two matrices, A and B, and did the same work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from collect.comparison import environment, ratio
from collect.comparison.match import DisjointKey, KeyDifference, Matches, find_disjoint_keys, match_cells
from collect.comparison.ratio import DifferenceWord, Mean
from collect.findings import comparability
from collect.findings.row import CellRow
from collect.findings.statistics import compute_standard_error
from collect.metric import Metric, load_metrics
from collect.reading.load import LoadedCell, LoadedMatrix
from collect.summary import Summary
from collect.verdicts.selection import Measurements
from shardlab.workspace.workspace import Workspace

SCHEMA_VERSION = 1
UNKNOWN_SCATTER_REASON = "n = 1 in {}, and no cell of that matrix was repeated, so the scatter is not known"
NO_RATIO_REASON = "a ratio needs means that are greater than 0"
ZERO_MEAN_REASON = "the repeats do not exclude a mean of 0, so the ratio has no bounds"
FALSE_POSITIVE_SHARE = 0.05  # the share of two-sided 95 % tests that find a difference by chance


class ComparedSide(msgspec.Struct, frozen=True):
    """A or B, as the output describes it."""

    name: str
    """The matrix, folder or archive, as given on the command line."""
    place: str
    """The path of the workspace."""
    matrix: str
    title: str
    rehearsal: bool
    remarks: list[str]
    """The remarks in the summary of the matrix."""


class EnvironmentDifference(msgspec.Struct, frozen=True):
    """A property of the machines or the software that differs between A and B."""

    what: str
    """The property."""
    a: list[str]
    """Its values in the runs of A."""
    b: list[str]
    """Its values in the runs of B."""


class MetricComparison(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A metric of a cell in A and in B. Fields that are not known are absent (ratio.py)."""

    metric: str
    unit: str
    a: float
    """Mean over the repeats in A."""
    b: float
    """Mean over the repeats in B."""
    n_a: int
    """Number of repeats in A."""
    n_b: int
    """Number of repeats in B."""
    verdict: DifferenceWord
    """How B differs from A, such as `faster` or `equal`."""
    ratio: float | None = None
    """B / A."""
    low: float | None = None
    """Lower end of the 95 % interval of the ratio."""
    high: float | None = None
    """Upper end of the 95 % interval of the ratio."""
    error_a: float | None = None
    """Standard error of the mean in A."""
    error_b: float | None = None
    """Standard error of the mean in B."""
    why: str = ""
    """The reason if there is no interval."""


class ComparedCell(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A cell that is in both A and B."""

    a: str
    """The id of the cell in A."""
    b: str
    """The id of the cell in B."""
    label: str
    """The cell in words."""
    state_a: str
    """States of the repeats of the cell in the first matrix, A."""
    state_b: str
    """States of the repeats of the cell in the second matrix, B."""
    different_work: str = ""
    """The reason if the two cells are not compared; then `metrics` is empty."""
    remarks: list[str] = []
    """Sentences about the comparison of this cell, such as a missing same-work proof."""
    metrics: list[MetricComparison] = []
    """One entry per metric that is known in A and in B."""


class GatedCell(msgspec.Struct, frozen=True):
    """What a condition of `--fail-if` says about a cell."""

    label: str
    """The cell in words."""
    verdict: Literal["fails", "passes", "undecided", "not judged"]
    """fails, passes: the repeats show it. undecided: they do not. not judged: the cell has no ratio of the metric."""
    why: str
    """The reason, with the numbers."""


class Gate(msgspec.Struct, frozen=True):
    """The answer to a condition of `--fail-if`."""

    condition: str
    """The condition, as given on the command line."""
    metric: str
    """The full name of the metric."""
    cells: list[GatedCell]
    """One entry per cell of A."""


class Comparison(msgspec.Struct, frozen=True):
    """The document that `collect compare --json` prints."""

    schema: int
    a: ComparedSide
    """Description of A."""
    b: ComparedSide
    """Description of B."""
    pairs: list[ComparedCell]
    """The cells that are in both."""
    only_a: list[str]
    """Labels of the cells of A without a match."""
    only_b: list[str]
    """Labels of the cells of B without a match."""
    differs: list[KeyDifference]
    """Keys in which cells differ although they were matched."""
    apart: list[DisjointKey]
    """If no cell is in both: the keys for which A and B have no value in common."""
    environment: list[EnvironmentDifference]
    """How the machines and the software of matched cells differ."""
    by_chance: float
    """Expected number of metrics that would differ by chance even if A and B were equal."""
    gates: list[Gate] = []
    """The answers to the conditions of `--fail-if`."""


class ComparedMatrix(msgspec.Struct, frozen=True):
    """One of the two compared matrices, A or B, with all its runs."""

    name: str
    workspace: Workspace
    loaded: LoadedMatrix
    summary: Summary

    def describe_side(self) -> ComparedSide:
        """The description of this matrix for the output, without its runs."""
        summary = self.summary
        place = str(self.workspace.path)
        return ComparedSide(self.name, place, summary.matrix, summary.title, summary.rehearsal, summary.remarks)


def compare_matrices(matrix_a: ComparedMatrix, matrix_b: ComparedMatrix) -> Comparison:
    """Match the cells of matrix A with those of matrix B, and compare the metrics of each matched pair."""
    matches = match_cells(matrix_a.loaded.cells, matrix_b.loaded.cells)
    measurements = [Measurements(matrix.loaded, matrix.summary.rows) for matrix in (matrix_a, matrix_b)]
    rows_by_id_of_sides = [{row.id: row for row in matrix.summary.rows} for matrix in (matrix_a, matrix_b)]
    label_by_cell = matrix_a.summary.labels_by_cell
    pairs = [
        _compare_pair(
            label_by_cell[cell_a.id],
            _CellResults(cell_a, rows_by_id_of_sides[0][cell_a.id], measurements[0]),
            _CellResults(cell_b, rows_by_id_of_sides[1][cell_b.id], measurements[1]),
        )
        for cell_a, cell_b in matches.pairs
    ]
    judged_metrics = [metric for pair in pairs for metric in pair.metrics if metric.verdict not in ("equal", "undecided")]
    return Comparison(
        schema=SCHEMA_VERSION,
        a=matrix_a.describe_side(),
        b=matrix_b.describe_side(),
        pairs=pairs,
        only_a=[label_by_cell[cell.id] for cell in matches.only_a],
        only_b=[matrix_b.summary.labels_by_cell[cell.id] for cell in matches.only_b],
        differs=matches.differs,
        apart=find_disjoint_keys(matches) if not pairs else [],
        environment=_find_environment_differences(matches),
        by_chance=round(FALSE_POSITIVE_SHARE * len(judged_metrics), 2),
    )


def _find_environment_differences(matches: Matches) -> list[EnvironmentDifference]:
    """The known properties of machines and software that differ: possible reasons for other results."""
    sides = zip(*matches.pairs, strict=True) if matches.pairs else ((), ())
    properties_a, b = (environment.collect_properties(run for cell in cells for run in cell.runs) for cells in sides)
    return [EnvironmentDifference(*difference) for difference in environment.find_property_differences(properties_a, b)]


class _CellResults(NamedTuple):
    cell: LoadedCell
    row: CellRow
    measurements: Measurements
    """Those of the cell's matrix."""


def _compare_pair(label: str, results_a: _CellResults, results_b: _CellResults) -> ComparedCell:
    different_work = _explain_different_work(results_a, results_b)
    return ComparedCell(
        a=results_a.row.id,
        b=results_b.row.id,
        label=label,
        state_a=results_a.row.state or "planned",
        state_b=results_b.row.state or "planned",
        different_work=different_work,
        remarks=_make_pair_remarks(results_a, results_b),
        metrics=[] if different_work else _compare_metrics(results_a, results_b),
    )


def _explain_different_work(results_a: _CellResults, b: _CellResults) -> str:
    """The reason why a cell in A and its match in B are not compared; '' if they are compared."""
    proof_results = [side.row.same_work for side in (results_a, b)]
    if any(proof and proof.verdict == "different" for proof in proof_results) or (
        proof_results[0] and proof_results[1] and proof_results[0].verdict != proof_results[1].verdict
    ):
        proof_texts = [
            f"{side_letter}: {proof.verdict} ({proof.why})" if proof else f"{side_letter}: no proof"
            for side_letter, proof in zip("AB", proof_results)
        ]
        return f"the same-work proofs found: {'; '.join(proof_texts)}"
    data = [{str(run.result.data.get("sha256")) for run in side.cell.completed_runs if run.result} for side in (results_a, b)]
    if data[0] and data[1] and data[0] != data[1]:
        return f"different data: SHA-256 {' and '.join(sorted(data[0]))} in A, {' and '.join(sorted(data[1]))} in B"
    is_rehearsal = [any(run.is_rehearsal for run in side.cell.completed_runs) for side in (results_a, b)]
    if results_a.row.n and b.row.n and is_rehearsal[0] != is_rehearsal[1]:
        return f"{'AB'[is_rehearsal[1]]} is a rehearsal"
    if trouble := "; ".join(side.row.gpu_trouble for side in (results_a, b) if side.row.gpu_trouble):
        return f"other processes used the GPUs, or the GPUs were throttled, while steps were timed ({trouble})"
    return ""


def _make_pair_remarks(results_a: _CellResults, results_b: _CellResults) -> list[str]:
    created_at = [{run.run_id: run.run.created for run in side.cell.runs if run.run} for side in (results_a, results_b)]
    remarks = ["the same runs in both"] if created_at[0] and created_at[0] == created_at[1] else []
    proof = results_a.row.same_work
    if proof and proof.verdict == "other work":  # as in B, because other pairs are not compared
        remarks.append(f"by design, not the same work as one process ({proof.why})")
    if (remark := comparability.describe_precision_difference([results_a.cell.cell, results_b.cell.cell])) is not None:
        remarks.append(remark)
    if not (proof and results_b.row.same_work):
        remarks.append("A, B or both have no same-work proof")
    return remarks


def _compare_metrics(results_a: _CellResults, results_b: _CellResults) -> list[MetricComparison]:
    comparisons = (_compare_metric(metric, results_a, results_b) for metric in load_metrics() if metric.of_run)
    return [comparison for comparison in comparisons if comparison]


def _compare_metric(metric: Metric, results_a: _CellResults, results_b: _CellResults) -> MetricComparison | None:
    """None if A or B has no value of the metric, or if the kinds differ, such as GPU memory and process memory."""
    estimate_a, estimate_b = results_a.row.metrics.get(metric.name), results_b.row.metrics.get(metric.name)
    if estimate_a is None or estimate_b is None or (estimate_a.unit, estimate_a.kind) != (estimate_b.unit, estimate_b.kind):
        return None
    means = [_compute_mean_with_error(metric, side) for side in (results_a, results_b)]
    mean_ratio, low, high = ratio.compute_mean_ratio(*means)
    return MetricComparison(
        metric=metric.name,
        unit=estimate_a.unit,
        a=estimate_a.value,
        b=estimate_b.value,
        n_a=estimate_a.n,
        n_b=estimate_b.n,
        verdict=ratio.choose_difference_word(means[0], means[1], estimate_a.unit),
        ratio=mean_ratio,
        low=low,
        high=high,
        error_a=means[0].error,
        error_b=means[1].error,
        why="" if low is not None else _explain_no_interval(mean_ratio, means),
    )


def _explain_no_interval(mean_ratio: float | None, means: list[Mean]) -> str:
    sides_without_error = [side_letter for side_letter, mean in zip("AB", means, strict=True) if mean.error is None]
    if sides_without_error:
        return UNKNOWN_SCATTER_REASON.format(" and ".join(sides_without_error))
    return NO_RATIO_REASON if mean_ratio is None else ZERO_MEAN_REASON


def _compute_mean_with_error(metric: Metric, side: _CellResults) -> Mean:
    """The mean of a metric of a cell, with its error, from 3 or more repeats, else from all repeated cells of the matrix."""
    repeat_values = [run.metrics[metric.name] for run in side.row.runs if metric.name in run.metrics]
    mean_value = side.row.metrics[metric.name].value
    if metric.exact and len(set(repeat_values)) == 1:
        return Mean(mean_value, 0, 1)
    error_and_degrees = compute_standard_error(repeat_values, side.measurements.find_noise(metric))
    return Mean(mean_value, error_and_degrees[0], error_and_degrees[1]) if error_and_degrees else Mean(mean_value, None, 0)


def select_differing_metrics(metrics: Iterable[MetricComparison]) -> list[MetricComparison]:
    """The metrics whose values in A and B differ by more than the scatter of repeats explains."""
    return [metric for metric in metrics if metric.verdict not in ("equal", "not to be told apart", "undecided")]
