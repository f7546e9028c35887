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
from collect.metric import Metric, all_metrics
from collect.reading.load import LoadedCell, LoadedMatrix
from collect.summary import Summary
from collect.verdicts.selection import Measurements
from shardlab.workspace.workspace import Workspace

SCHEMA = 1
SCATTER_UNKNOWN = "n = 1 in {}, and no cell of that matrix was repeated, so the scatter is not known"
NO_RATIO = "a ratio needs means that are greater than 0"
MEAN_MAY_BE_ZERO = "the repeats do not exclude a mean of 0, so the ratio has no bounds"
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


def compare_matrices(a: ComparedMatrix, b: ComparedMatrix) -> Comparison:
    """Match the cells of matrix A with those of matrix B, and compare the metrics of each matched pair."""
    matches = match_cells(a.loaded.cells, b.loaded.cells)
    measurements = [Measurements(cell_a.loaded, cell_a.summary.rows) for cell_a in (a, b)]
    rows = [{row.id: row for row in cell_a.summary.rows} for cell_a in (a, b)]
    labels = a.summary.labels_by_cell
    pairs = [
        _compare_pair(
            labels[cell_a.id],
            _CellResults(cell_a, rows[0][cell_a.id], measurements[0]),
            _CellResults(cell_b, rows[1][cell_b.id], measurements[1]),
        )
        for cell_a, cell_b in matches.pairs
    ]
    judged_metrics = [metric for pair in pairs for metric in pair.metrics if metric.verdict not in ("equal", "undecided")]
    return Comparison(
        schema=SCHEMA,
        a=a.describe_side(),
        b=b.describe_side(),
        pairs=pairs,
        only_a=[labels[cell.id] for cell in matches.only_a],
        only_b=[b.summary.labels_by_cell[cell.id] for cell in matches.only_b],
        differs=matches.differs,
        apart=find_disjoint_keys(matches) if not pairs else [],
        environment=_find_environment_differences(matches),
        by_chance=round(FALSE_POSITIVE_SHARE * len(judged_metrics), 2),
    )


def _find_environment_differences(matches: Matches) -> list[EnvironmentDifference]:
    """The known properties of machines and software that differ: possible reasons for other results."""
    sides = zip(*matches.pairs, strict=True) if matches.pairs else ((), ())
    a, b = (environment.collect_properties(run for cell in cells for run in cell.runs) for cells in sides)
    return [EnvironmentDifference(*difference) for difference in environment.find_property_differences(a, b)]


class _CellResults(NamedTuple):
    cell: LoadedCell
    row: CellRow
    measurements: Measurements
    """Those of the cell's matrix."""


def _compare_pair(label: str, a: _CellResults, b: _CellResults) -> ComparedCell:
    different_work = _different_work_reason(a, b)
    return ComparedCell(
        a=a.row.id,
        b=b.row.id,
        label=label,
        state_a=a.row.state or "planned",
        state_b=b.row.state or "planned",
        different_work=different_work,
        remarks=_pair_remarks(a, b),
        metrics=[] if different_work else _compare_metrics(a, b),
    )


def _different_work_reason(a: _CellResults, b: _CellResults) -> str:
    """The reason why a cell in A and its match in B are not compared; '' if they are compared."""
    proof_results = [side.row.same_work for side in (a, b)]
    if any(proof and proof.verdict == "different" for proof in proof_results) or (
        proof_results[0] and proof_results[1] and proof_results[0].verdict != proof_results[1].verdict
    ):
        proof_texts = [
            f"{name}: {proof.verdict} ({proof.why})" if proof else f"{name}: no proof"
            for name, proof in zip("AB", proof_results)
        ]
        return f"the same-work proofs found: {'; '.join(proof_texts)}"
    data = [{str(run.result.data.get("sha256")) for run in side.cell.completed_runs if run.result} for side in (a, b)]
    if data[0] and data[1] and data[0] != data[1]:
        return f"different data: SHA-256 {' and '.join(sorted(data[0]))} in A, {' and '.join(sorted(data[1]))} in B"
    is_rehearsal = [any(run.is_rehearsal for run in side.cell.completed_runs) for side in (a, b)]
    if a.row.n and b.row.n and is_rehearsal[0] != is_rehearsal[1]:
        return f"{'AB'[is_rehearsal[1]]} is a rehearsal"
    if trouble := "; ".join(side.row.gpu_trouble for side in (a, b) if side.row.gpu_trouble):
        return f"other processes used the GPUs, or the GPUs were throttled, while steps were timed ({trouble})"
    return ""


def _pair_remarks(a: _CellResults, b: _CellResults) -> list[str]:
    created_at = [{run.run_id: run.run.created for run in side.cell.runs if run.run} for side in (a, b)]
    remarks = ["the same runs in both"] if created_at[0] and created_at[0] == created_at[1] else []
    proof = a.row.same_work
    if proof and proof.verdict == "other work":  # as in B, because other pairs are not compared
        remarks.append(f"by design, not the same work as one process ({proof.why})")
    if (remark := comparability.precision_remark([a.cell.cell, b.cell.cell])) is not None:
        remarks.append(remark)
    if not (proof and b.row.same_work):
        remarks.append("A, B or both have no same-work proof")
    return remarks


def _compare_metrics(a: _CellResults, b: _CellResults) -> list[MetricComparison]:
    comparisons = (_compare_metric(metric, a, b) for metric in all_metrics() if metric.of_run)
    return [comparison for comparison in comparisons if comparison]


def _compare_metric(metric: Metric, a: _CellResults, b: _CellResults) -> MetricComparison | None:
    """None if A or B has no value of the metric, or if the kinds differ, such as GPU memory and process memory."""
    estimate_a, estimate_b = a.row.metrics.get(metric.name), b.row.metrics.get(metric.name)
    if estimate_a is None or estimate_b is None or (estimate_a.unit, estimate_a.kind) != (estimate_b.unit, estimate_b.kind):
        return None
    means = [_mean_with_error(metric, side) for side in (a, b)]
    value, low, high = ratio.compute_mean_ratio(*means)
    return MetricComparison(
        metric=metric.name,
        unit=estimate_a.unit,
        a=estimate_a.value,
        b=estimate_b.value,
        n_a=estimate_a.n,
        n_b=estimate_b.n,
        verdict=ratio.difference_word(means[0], means[1], estimate_a.unit),
        ratio=value,
        low=low,
        high=high,
        error_a=means[0].error,
        error_b=means[1].error,
        why="" if low is not None else _no_interval_reason(value, means),
    )


def _no_interval_reason(value: float | None, means: list[Mean]) -> str:
    unknown = [name for name, mean in zip("AB", means, strict=True) if mean.error is None]
    if unknown:
        return SCATTER_UNKNOWN.format(" and ".join(unknown))
    return NO_RATIO if value is None else MEAN_MAY_BE_ZERO


def _mean_with_error(metric: Metric, side: _CellResults) -> Mean:
    """The mean of a metric of a cell, with its error, from 3 or more repeats, else from all repeated cells of the matrix."""
    values = [run.metrics[metric.name] for run in side.row.runs if metric.name in run.metrics]
    value = side.row.metrics[metric.name].value
    if metric.exact and len(set(values)) == 1:
        return Mean(value, 0, 1)
    error_and_degrees = compute_standard_error(values, side.measurements.find_noise(metric))
    return Mean(value, error_and_degrees[0], error_and_degrees[1]) if error_and_degrees else Mean(value, None, 0)


def select_differing_metrics(metrics: Iterable[MetricComparison]) -> list[MetricComparison]:
    """The metrics whose values in A and B differ by more than the scatter of repeats explains."""
    return [metric for metric in metrics if metric.verdict not in ("equal", "not to be told apart", "undecided")]
