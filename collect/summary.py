"""Computes the results of a matrix as one typed value, `Summary`. All tables, figures and documents show only this value.

Remarks on a whole matrix, such as that its runs are a rehearsal, are made here (`_build_remarks`); those on choices and on
verdicts in collect/report/choice_text.py and verdict_text.py.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import cached_property
from typing import Any

import msgspec

from collect.choices import printed_tables, winner_reasons
from collect.choices.family import ChoiceFamily, choose_strategies
from collect.choices.printed_tables import FilledTable
from collect.findings import (
    bytes_disputed,
    columns,
    equal_losses,
    injected_faults,
    instrument_cost,
    prediction_scores,
    searches,
    trace_answers,
    trace_changes,
    trace_details,
    trace_lacks,
    trace_tables,
    weight_checksums,
)
from collect.findings.columns import CellTables
from collect.findings.comparability import describe_gpu_trouble, describe_sync_of_cells, find_baseline, group_families
from collect.findings.equal_losses import LossComparison
from collect.findings.injected_faults import LostWorkerEffect, StragglerEffect
from collect.findings.instrument_cost import InstrumentCost
from collect.findings.prediction_scores import PredictionScore
from collect.findings.row import CellRow, RunRow
from collect.findings.searches import SearchResult
from collect.findings.statistics import Estimate, estimate_mean, find_outlier_indexes
from collect.findings.trace_answers import CellDifference, GroupTraffic, RankWaiting
from collect.findings.trace_changes import CellAdvice, CellWork
from collect.findings.trace_details import AttentionOfStep, DeviceMemory, IdleTime, LayerOfStep, PhaseOfStep, ProductOfStep
from collect.findings.trace_tables import Collective, OperatorDifferences, Rounding
from collect.findings.traffic import RunTraffic, measure_run_traffic
from collect.loading.loaded_run import Quantity
from collect.loading.records import NO_FOLDER_STATE
from collect.loading.telemetry import Coverage
from collect.metric import MeanPair, Metric, compute_quantities, load_metrics
from collect.reading.load import LoadedCell, LoadedMatrix
from collect.verdicts.claims import Verdict, is_illustrative, judge_claims
from collect.verdicts.reported import ReportedResult, compare_reported_numbers
from collect.verdicts.selection import Measurements
from shardlab.matrix.cell import AnyCell
from shardlab.matrix.citation import Citation
from shardlab.matrix.study import Assumed, Deviation, Note
from shardlab.runs.record import SameWork
from shardlab.runs.run import REHEARSAL_NOTE
from shardlab.runs.state import IMPORTED, STATE_MEANINGS
from shardlab.workspace import handles

SCHEMA = 1
MOST_NAMED = 20  # the most cells or runs that a remark lists by name
INSTRUMENTS_DIFFER_NOTE = (
    "compared cells have different instruments; throughput, step time and memory do not include "
    "the steps that an instrument observed: {}"
)
DEVIATIONS_NOTE = "changed matrix: {} changes by --adapt, to fit the cluster, or by --set; the report lists each as a deviation"
NO_KERNELS = "the study used HolisticTraceAnalysis, which finds no GPU kernels in {}; metrics of these traces are exact instead"
PLAYED = "played GPUs: a stub of NVML made up the GPU telemetry of {}; figures mark it, and no metric and no ranking uses it"
IMPORTED_NOTE = (
    "made from logs of other programs: nothing proves which work was done, strategy and ranks are labels, "
    "and no ranking uses these runs"
)
SYNTHETIC = "synthetic data in {}: losses and accuracies say nothing about real data"


class Failure(msgspec.Struct):
    """A run that did not complete."""

    run: str
    cell: str
    state: str
    why: str
    superseded: bool
    """Whether a later attempt of the same repeat counts instead."""


class DamagedRun(msgspec.Struct):
    """A run some of whose records could not be read."""

    run: str
    truncated: list[str]
    """Names of files that end in the middle of a record."""
    corrupt: dict[str, int]
    """Name of a file -> number of its lines that cannot be read."""
    says: str
    """The damage in words."""


class Outlier(msgspec.Struct):
    """A repeat whose value of a metric is far from the other repeats. The value is still part of every mean and figure."""

    run: str
    cell: str
    metric: str
    value: float
    """The value of this repeat, in the unit of the metric."""
    median: float
    """The median of the metric over all repeats of the cell."""


class Summary(msgspec.Struct, dict=True):
    """All results of a matrix, as in report/summary.json."""

    schema: int
    matrix: str
    title: str
    created_s: float
    """Seconds since the epoch."""
    baseline: str
    rehearsal: bool
    synthetic: bool
    """Whether a cell trained on synthetic data."""
    remarks: list[str]
    """What a reader must know, as sentences."""
    rows: list[CellRow]
    """One per cell."""
    reported: list[ReportedResult]
    """The numbers that the study prints, beside the measured numbers."""
    tables: list[FilledTable]
    """Tables of the study that are mostly text, beside what was measured."""
    verdicts: list[Verdict]
    """One per claim of the study."""
    choices: list[ChoiceFamily]
    """Which strategy to choose, by workload."""
    reasons: list[CellDifference]
    """Why the fastest cell of a comparison is faster than the next, if both were profiled: `baseline` is the slower cell."""
    illustrative: bool
    """Whether the study measured none of the numbers that it prints."""
    assumed: list[Assumed]
    """Values of cell keys that the study does not state, so the matrix assumes them."""
    notes: list[Note]
    """Notes in the matrix file about tables, sections or figures of the study."""
    citation: Citation | None
    """How to cite the study; null: not known."""
    deviations: list[Deviation]
    """How the matrix was changed to fit the cluster, or by --set, compared with the original matrix."""
    outliers: list[Outlier]
    """Repeats whose value of a metric is far from that of other repeats."""
    failures: list[Failure]
    """Runs that did not complete."""
    telemetry: list[Coverage]
    """How complete the telemetry of each run is."""
    traffic: list[RunTraffic]
    """Bytes that each run sent, by host."""
    losses: list[LossComparison]
    """Comparisons of losses between cells."""
    instruments: list[InstrumentCost]
    """What the instruments cost."""
    slowed: list[StragglerEffect]
    """What ranks that were slowed on purpose did to their cells."""
    lost: list[LostWorkerEffect]
    """What cells lost with workers that were ended on purpose."""
    predictions: list[PredictionScore]
    """The score of the planner; empty if no run has a prediction to compare."""
    rounding: list[Rounding]
    """Trace metrics with and without HTA's rounding; empty unless the matrix asks for HTA's."""
    collectives: list[Collective]
    """Calls and time of the collectives of profiled cells."""
    operators: list[OperatorDifferences]
    """Operators of profiled cells, compared with the baseline."""
    advice: list[CellAdvice]
    """What to change in profiled cells, and the most time that each change could save."""
    work: list[CellWork]
    """What the profiled steps of each cell go into, by category and operator, launching call and stream."""
    groups: list[GroupTraffic]
    """Collectives by process group."""
    waiting: list[RankWaiting]
    """How long ranks wait for slow ranks."""
    steps: list[CellDifference]
    """Why a step takes longer or shorter than in the baseline, by part."""
    idle: list[IdleTime]
    """Idle time of a profiled step, by cause."""
    phases: list[PhaseOfStep]
    """Times of the phases of a profiled step."""
    layers: list[LayerOfStep]
    """Time of each module of the model."""
    device_memory: list[DeviceMemory]
    """Memory of each kind of device over the profiled steps."""
    matrix_products: list[ProductOfStep]
    """Achieved FLOP/s of matrix products."""
    attention: list[AttentionOfStep]
    """Calls and time of each implementation of attention."""
    searches: list[SearchResult]
    """Searches for a batch size, with the sizes that were tried."""
    damage: list[DamagedRun]
    """Runs with damaged records."""

    @cached_property
    def table(self) -> CellTables:
        """The rows of the summary as tables."""
        return columns.make_cell_tables(self.rows)

    @cached_property
    def labels_by_cell(self) -> dict[str, str]:
        """The label of each row: {id of its cell: label}."""
        return columns.map_cells_to_labels(self.rows)


def summarize(loaded: LoadedMatrix, baseline: str) -> Summary:
    """Compute the summary of a matrix: every metric of every cell over the repeats of the cell, and the results that use them.

    Only the latest attempt of each repeat counts, and only if it completed. baseline: the strategy relative to which speed-ups
    are computed.
    """
    cell_handles = handles.number_cells(cell.id for cell in loaded.expansion.cells)
    rows = [msgspec.structs.replace(row, handle=cell_handles.get(row.id, "")) for row in _build_rows(loaded.cells, baseline)]
    measurements = Measurements(loaded, rows)
    choices = choose_strategies(measurements)
    return Summary(
        schema=SCHEMA,
        matrix=loaded.expansion.name,
        title=loaded.expansion.title,
        created_s=round(time.time(), 3),
        baseline=baseline,
        rehearsal=any(run.is_rehearsal for run in loaded.runs if run.run),
        synthetic=bool(_list_synthetic_workloads(loaded)),
        remarks=_build_remarks(loaded, rows),
        rows=rows,
        reported=compare_reported_numbers(loaded, measurements),
        tables=printed_tables.fill_tables(loaded.expansion.tables, rows, choices),
        verdicts=judge_claims(loaded, measurements),
        choices=choices,
        reasons=winner_reasons.explain_winners(loaded, choices),
        illustrative=is_illustrative(loaded),
        assumed=loaded.expansion.assumed,
        notes=loaded.expansion.notes,
        citation=loaded.expansion.citation,
        deviations=loaded.expansion.deviations,
        outliers=[outlier for row in rows for outlier in _find_outliers(row)],
        failures=[failure for cell in loaded.cells for failure in _list_failures(cell)],
        telemetry=[coverage for run in loaded.runs for coverage in run.coverage],
        traffic=[traffic for cell in loaded.cells for run in cell.runs if (traffic := measure_run_traffic(run)) is not None],
        losses=equal_losses.compare_losses(loaded, baseline),
        instruments=instrument_cost.compute_instrument_costs(loaded),
        slowed=injected_faults.compute_straggler_effects(loaded, rows),
        lost=injected_faults.compute_lost_worker_effects(loaded, rows),
        predictions=prediction_scores.score_predictions(loaded),
        rounding=trace_tables.list_roundings(loaded),
        collectives=trace_tables.list_collectives(loaded),
        operators=trace_tables.compare_operators(loaded, rows),
        advice=trace_changes.list_cell_advice(loaded),
        work=trace_changes.list_cell_work(loaded),
        groups=trace_answers.list_group_traffic(loaded),
        waiting=trace_answers.list_rank_waiting(loaded),
        steps=trace_answers.list_step_differences(loaded, rows),
        idle=trace_details.list_idle_times(rows),
        phases=trace_details.list_phase_times(loaded),
        layers=trace_details.list_layer_times(loaded),
        device_memory=trace_details.list_device_memories(loaded),
        matrix_products=trace_details.list_matrix_products(loaded),
        attention=trace_details.list_attention_uses(loaded),
        searches=searches.list_search_results(loaded.searches),
        damage=[
            DamagedRun(run.run_id, run.damage.truncated, run.damage.corrupt, run.damage.describe())
            for run in loaded.runs
            if run.damage
        ],
    )


def _build_remarks(loaded: LoadedMatrix, rows: list[CellRow]) -> list[str]:
    """The remarks that every output prints, because a reader must know them to judge the numbers."""
    deviation_count = len(loaded.expansion.deviations)
    return [
        *_describe_artificial_runs(loaded),
        *_describe_different_work(rows),
        *_describe_doubtful_numbers(loaded, rows),
        *dict.fromkeys(filter(None, map(describe_sync_of_cells, group_families(loaded.cells)))),
        *_describe_instruments(loaded),
        *injected_faults.describe_cells_with_faults(rows),
        *([DEVIATIONS_NOTE.format(deviation_count)] if deviation_count else []),
    ]


def _list_synthetic_workloads(loaded: LoadedMatrix) -> list[str]:
    """For each run that trained on synthetic data, the workload of the run."""
    return [cell.cell.workload for cell in loaded.cells for run in cell.runs if run.result and run.result.data.get("synthetic")]


def _describe_artificial_runs(loaded: LoadedMatrix) -> list[str]:
    """Remarks on rehearsals, on imported runs and on synthetic data."""
    remarks = []
    is_rehearsal_by_run = [run.is_rehearsal for run in loaded.runs if run.run]
    if any(is_rehearsal_by_run):
        count_text = "" if all(is_rehearsal_by_run) else f"{sum(is_rehearsal_by_run)} of {len(is_rehearsal_by_run)} runs are a "
        remarks.append(count_text + REHEARSAL_NOTE)
    imported_runs = [f"{run.run_id} ({run.verdict.why})" for run in loaded.runs if run.verdict.state == IMPORTED]
    if imported_runs:
        remarks.append(f"{IMPORTED_NOTE}: {_join_ids(imported_runs)}")
    if synthetic_workloads := _list_synthetic_workloads(loaded):
        remarks.append(SYNTHETIC.format(", ".join(dict.fromkeys(synthetic_workloads))))
    return remarks


def _describe_different_work(rows: list[CellRow]) -> list[str]:
    """Remarks on cells that are not compared because they do other work than the other cells."""
    remarks = []
    other_work_rows = [row for row in rows if row.does_other_work]
    if different_ids := [row.id for row in other_work_rows if row.same_work and row.same_work.verdict == "different"]:
        remarks.append(f"not compared, because the same-work proof found different work: {_join_ids(different_ids)}")
    by_design: dict[str, list[str]] = {}  # reason -> ids of cells
    for row in other_work_rows:
        if row.same_work and row.same_work.verdict == "other work":
            by_design.setdefault(row.same_work.why, []).append(row.id)
    return remarks + [
        f"not compared, because they do other work by design ({reason}): {_join_ids(ids)}" for reason, ids in by_design.items()
    ]


def _describe_doubtful_numbers(loaded: LoadedMatrix, rows: list[CellRow]) -> list[str]:
    """Remarks on numbers that another program, an interruption, missing telemetry or a wrong measurement may have changed."""
    runs = [run for cell in loaded.cells for run in cell.runs]
    places_by_remark = {
        "not compared, because GPUs were shared, throttled or faulty while steps were timed": [
            row.gpu_trouble for row in rows if row.gpu_trouble
        ],
        "on nodes that other jobs may use too, which may change the speed (exclusive: false)": [
            run.run_id for run in runs if run.run and run.run.shares_nodes
        ],
        "resumed from a checkpoint, so telemetry does not cover the whole run": [run.run_id for run in runs if run.resumed],
        "suspended or stopped during timed steps; times that include the pause do not count": [
            run.run_id for run in runs if run.was_suspended
        ],
        "telemetry covers only a part of the timed window, and so do its means": [
            f"{entry.run} on {entry.host} ({entry.incomplete})" for entry in _list_incomplete_telemetry(loaded)
        ],
        "trouble of telemetry": [
            f"{entry.run} on {entry.host} ({entry.trouble})" for run in loaded.runs for entry in run.coverage if entry.trouble
        ],
        **trace_lacks.list_trace_lacks(loaded),
        "bytes that were measured differ from the theory by more than the tolerance": bytes_disputed.list_disputes(rows),
    }
    return [f"{remark}: {_join_ids(places)}" for remark, places in places_by_remark.items() if places]


def _describe_instruments(loaded: LoadedMatrix) -> list[str]:
    """Remarks on GPU values that were made up, on instruments that differ between cells, and on traces without kernels."""
    remarks = []
    if played_runs := [run.run_id for run in loaded.runs if run.plays_gpus]:
        remarks.append(PLAYED.format(_join_ids(played_runs)))
    if instrument_differences := instrument_cost.describe_instrument_differences(group_families(loaded.cells)):
        remarks.append(INSTRUMENTS_DIFFER_NOTE.format(_join_ids(instrument_differences)))
    exact_runs, profiled_count = trace_tables.list_runs_without_kernels(loaded)
    if exact_runs:
        remarks.append(NO_KERNELS.format("any profiled run" if len(exact_runs) == profiled_count else _join_ids(exact_runs)))
    return remarks


def _list_incomplete_telemetry(loaded: LoadedMatrix) -> list[Coverage]:
    """The coverage of telemetry that is incomplete, for runs that completed. Other runs are not used to compute means."""
    completed = {run.run_id for run in loaded.runs if run.completed}
    return [coverage for run in loaded.runs for coverage in run.coverage if coverage.incomplete and coverage.run in completed]


def _join_ids(ids: list[str]) -> str:
    """A list of ids in words: the first MOST_NAMED ids, then how many more there are."""
    return ", ".join([*ids[:MOST_NAMED], *([f"and {len(ids) - MOST_NAMED:,} more"] if len(ids) > MOST_NAMED else [])])


def _build_rows(cells: list[LoadedCell], baseline_strategy: str) -> list[CellRow]:
    """The rows of all cells, compared with their baselines. baseline_strategy: as for `summarize`."""
    same_work_by_cell = weight_checksums.judge_same_work(cells)
    cell_rows = [_build_cell_row(cell, same_work_by_cell.get(cell.id)) for cell in cells]
    _add_comparisons(cells, cell_rows, baseline_strategy)
    return cell_rows


def _build_cell_row(cell: LoadedCell, compared_work: SameWork | None) -> CellRow:
    """The row of a cell. compared_work: the verdict of the comparison with other cells; None: that of the runs counts."""
    quantities_by_metric: dict[str, list[Quantity]] = {}
    runs = []
    for run in cell.runs:
        run_quantities = compute_quantities(run)
        for name, quantity in run_quantities.items():
            quantities_by_metric.setdefault(name, []).append(quantity)
        values = {name: quantity.value for name, quantity in run_quantities.items()}
        gpu_trouble_text = describe_gpu_trouble(run) if run.completed else ""
        runs.append(RunRow(run.run_id, run.repeat, run.attempt, run.verdict.state, run.verdict.why, values, gpu_trouble_text))
    state_order = list(STATE_MEANINGS)
    count_by_state = Counter(sorted((run.verdict.state for run in cell.runs), key=state_order.index))
    return CellRow(
        id=cell.id,
        cell=_describe_cell(cell.cell),
        n=len(cell.completed_runs),
        states=dict(count_by_state),
        expected=count_by_state.keys() <= {"completed", *cell.cell.expect},
        same_work=compared_work
        or next((run.result.same_work for run in cell.runs if run.result and run.result.same_work), None),
        baseline=None,
        metrics={name: mean for name, values in quantities_by_metric.items() if (mean := _estimate_over_repeats(values))},
        runs=runs,
    )


def _describe_cell(cell: AnyCell) -> dict[str, Any]:
    """The cell in its plain form. The keys that the logs of an imported cell do not state are null."""
    plain_cell: dict[str, Any] = msgspec.to_builtins(cell)
    known_keys = ("workload", "strategy", "gpus", "imported", "instruments", "options")
    return {key: value if key in known_keys or not cell.imported else None for key, value in plain_cell.items()}


def _estimate_over_repeats(quantities: list[Quantity]) -> Estimate | None:
    """The mean of a metric over repeats; None if the values have different kinds or units, so that they have no common mean."""
    if len({(quantity.unit, quantity.kind) for quantity in quantities}) > 1:
        return None
    return estimate_mean([quantity.value for quantity in quantities], quantities[0].unit, quantities[0].kind)


def _add_comparisons(cells: list[LoadedCell], rows: list[CellRow], baseline: str) -> None:
    """Add to each row the metrics that compare its cell with the baseline cell.

    Two values are compared only if they have the same unit and kind.
    """
    row_of = {row.id: row for row in rows}
    comparing_metrics = [metric for metric in load_metrics() if metric.of_cells is not None]
    for cell, cell_family in ((cell, family_cells) for family_cells in group_families(cells) for cell in family_cells):
        row, baseline_cell = row_of[cell.id], find_baseline(cell, cell_family, baseline)
        if baseline_cell is None or cell.cell.imported:
            continue
        for metric in comparing_metrics:
            if explain_why_not_compared(metric, row, row_of[baseline_cell.id]):
                continue
            cell_estimate, baseline_estimate = (other.metrics[metric.compares] for other in (row, row_of[baseline_cell.id]))
            assert metric.of_cells is not None
            quantity = metric.of_cells(MeanPair(cell.cell, cell_estimate.value, baseline_cell.cell, baseline_estimate.value))
            if quantity is not None:
                ratio = quantity.value
                row.baseline = baseline_cell.id
                row.metrics[metric.name] = Estimate(ratio, quantity.unit, row.n, ratio, kind=quantity.kind)


def explain_why_not_compared(metric: Metric, row: CellRow, baseline_row: CellRow) -> str:
    """Why a metric that compares two cells has no value for these two rows, as a clause; '' if the rows may be compared."""
    for compared_row in (row, baseline_row):
        if compared_row.does_other_work:
            return f"{compared_row.id} does other work, so its speed is not compared"
        if compared_row.gpu_trouble:
            trouble = compared_row.gpu_trouble
            return f"GPUs of {compared_row.id} were shared, throttled or faulty, so its speed is not compared ({trouble})"
    row_estimate, baseline_estimate = row.metrics.get(metric.compares), baseline_row.metrics.get(metric.compares)
    if row_estimate is None or baseline_estimate is None:
        return f"{(row if row_estimate is None else baseline_row).id} has no value of {metric.compares}"
    if (row_estimate.unit, row_estimate.kind) != (baseline_estimate.unit, baseline_estimate.kind):
        return f"{metric.compares} of {row.id} and {baseline_row.id} have different units or kinds"
    return ""


def _find_outliers(row: CellRow) -> list[Outlier]:
    outliers = []
    for metric_name, estimate in row.metrics.items():
        runs_with_value = [run for run in row.runs if metric_name in run.metrics]
        for index in find_outlier_indexes([run.metrics[metric_name] for run in runs_with_value]):
            run = runs_with_value[index]
            outliers.append(Outlier(run.run_id, row.id, metric_name, run.metrics[metric_name], estimate.median))
    return outliers


def _list_failures(cell: LoadedCell) -> list[Failure]:
    """All runs of a cell that ended without completing, or whose state is not known. Runs that are running or waiting do not
    count."""
    unfailed_states = {"planned", "pending", "running", "completed", IMPORTED}
    return [
        Failure(run.run_id, cell.id, run.verdict.state, run.verdict.why, is_superseded)
        for runs, is_superseded in ((cell.runs, False), (cell.earlier_attempts, True))
        for run in runs
        if run.verdict.state not in unfailed_states and run.verdict != NO_FOLDER_STATE
    ]
