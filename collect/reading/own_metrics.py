"""Computes the metrics that a workspace defines itself (docs/own-models.md) in WORKSPACE/metrics/NAME.py, in a tuple METRICS.

A separate process executes the files and computes the values, so that an error in a file does not end the command:
python -m collect.reading.own_metrics WORKSPACE MATRIX FILE... --out ANSWER. If MATRIX is '', the metrics are only described.
The files are executed only if the workspace is trusted, because they may come from somebody else, for example in an archive.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from collect import metric
from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricFacts, Reads
from collect.reading.load import LoadedMatrix, load_matrix
from shardlab.errors import InputError
from shardlab.files import files, plugin_source
from shardlab.matrix import metric_names
from shardlab.plugins import own_code, plugin_process
from shardlab.plugins.plugin_kind import PluginKind
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

METRIC_NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,47}")
TIME_LIMIT_S = 3600  # time limit in seconds of the separate process, which itself reads all records of the matrix


class DescribedMetric(MetricFacts, frozen=True, kw_only=True):
    """A metric that the workspace defines, without its function."""

    file: str
    """The path of the file that defines the metric."""
    code: str
    """A digest of the file's source code."""


class OwnMetrics(msgspec.Struct, frozen=True):
    """The metrics that a workspace defines itself, and their values for the runs of a matrix."""

    metrics: list[DescribedMetric] = []
    values: dict[str, dict[str, Quantity]] = {}
    """Run id -> metric name -> value."""
    faults: list[str] = []
    """Why files define no metric, or why metrics have no value: one sentence for each fault."""

    def list_remarks(self) -> list[str]:
        """The remarks for a report: which file computed which metrics, and which metrics could not be computed."""
        names_by_file: dict[tuple[str, str], list[str]] = {}
        for described_metric in self.metrics:
            names_by_file.setdefault((described_metric.file, described_metric.code), []).append(described_metric.name)
        remark_texts = [
            f"own metrics of the workspace: {', '.join(own_metric_names)} by {file_name} (digest {code_digest})"
            for (file_name, code_digest), own_metric_names in names_by_file.items()
        ]
        return [*remark_texts, *self.faults]

    def add_to_menu(self) -> None:
        """Add these metrics, without their functions, to `collect.metric.load_metrics`. They replace those of earlier calls."""
        metric.set_workspace_metrics([Metric(**_list_facts(described_metric)) for described_metric in self.metrics])

    def add_to_runs(self, loaded: LoadedMatrix) -> None:
        """Add these metrics to `collect.metric.load_metrics`, and their values to the runs of `loaded`."""
        self.add_to_menu()
        for run in loaded.runs:
            if run.run_id in self.values:
                run.quantities = metric.compute_quantities(run) | self.values[run.run_id]


METRIC_PLUGINS = PluginKind("metric", "metrics", OwnMetrics)


def compute_own_metrics(workspace: Workspace, matrix: str | None, *, original_workspace: Workspace | None = None) -> OwnMetrics:
    """The metrics that the workspace defines itself, and their values for the runs of a matrix.

    matrix: the name of the matrix; None: no values are computed. original_workspace: the workspace of which `workspace` is
    a copy; None: it is no copy. If the user may not act in it (shardlab.workspace.workspace_trust), no file is executed, and
    `faults` of the result says so. Raises WorkspaceError if a file of the workspace cannot be read."""
    metrics_folder = workspace.path / METRIC_PLUGINS.folder
    plugin_paths = plugin_source.list_plugin_files(metrics_folder)
    if not plugin_paths:
        return OwnMetrics()
    module_arguments = ["collect.reading.own_metrics", str(workspace.path), matrix or "", *map(str, plugin_paths)]
    try:
        workspace_trust.must_be_allowed(original_workspace or workspace, f"execute {plugin_paths[0]}")
        return plugin_process.ask_process(module_arguments, metrics_folder, METRIC_PLUGINS.answer_type, TIME_LIMIT_S)
    except InputError as error:
        return OwnMetrics(faults=[str(error)])


def main(workspace: str, matrix_name: str, *file_arguments: str) -> None:
    """Write the metrics, their values, and the faults to a JSON file, in the form of `OwnMetrics`.

    workspace: its path. matrix_name: the name of the matrix for whose runs values are computed; '': no values. file_arguments:
    the files that define metrics, then `--out`, then the JSON file."""
    *plugin_paths, _, answer_path = file_arguments
    described_metrics: list[DescribedMetric] = []
    faults: list[str] = []
    defined_metrics: dict[str, tuple[str, Metric]] = {}  # name of a metric -> (path of the file that defines it, the metric)
    for path in map(Path, plugin_paths):
        try:
            plugin = plugin_source.read_plugin(path)
            for own_metric in _check_metrics(path, getattr(own_code.execute_plugin(plugin), "METRICS", None)):
                METRIC_PLUGINS.refuse_used_name(
                    path, own_metric.name, list_shipped_names(), {name: file for name, (file, _) in defined_metrics.items()}
                )
                defined_metrics[own_metric.name] = (str(path), own_metric)
                described_metrics.append(DescribedMetric(**_list_facts(own_metric), file=str(path), code=plugin.digest))
        except InputError as error:
            faults.append(str(error))
    values_by_run: dict[str, dict[str, Quantity]] = {}
    runs = load_matrix(Workspace(Path(workspace)), matrix_name).runs if matrix_name and defined_metrics else []
    for run in (run for run in runs if run.completed):
        run_values = {
            name: _compute_own_value(file, own_metric, run, faults) for name, (file, own_metric) in defined_metrics.items()
        }
        values_by_run[run.run_id] = {name: quantity for name, quantity in run_values.items() if quantity is not None}
    files.write_json(Path(answer_path), OwnMetrics(described_metrics, values_by_run, list(dict.fromkeys(faults))), sync=False)


def _list_facts(own_metric: MetricFacts) -> dict[str, Any]:
    return {fact_name: getattr(own_metric, fact_name) for fact_name in MetricFacts.__struct_fields__}


def list_shipped_names() -> set[str]:
    """The names of the metrics of shardlab, which a workspace cannot define again."""
    return {*metric_names.KNOWN_METRICS, *(shipped_metric.name for shipped_metric in metric.load_metrics())}


def _check_metrics(path: Path, metrics_value: object) -> list[Metric]:
    """The metrics in the variable METRICS of the file `path`. metrics_value: the value of the variable.

    Raises InputError if the value is not a tuple or list of metrics, or if a metric is not a function of one run.
    """
    if (
        not isinstance(metrics_value, (tuple, list))
        or not metrics_value
        or not all(isinstance(own_metric, Metric) for own_metric in metrics_value)
    ):
        raise InputError(f"{path}: METRICS is no tuple of metrics. Needed: METRICS = (Metric(...),) of collect.metric.")
    for own_metric in metrics_value:
        if not isinstance(own_metric.name, str) or not METRIC_NAME_PATTERN.fullmatch(own_metric.name):
            raise InputError(
                f"{path}: {str(own_metric.name)[:40]!r} cannot be the name of a metric. Allowed: {METRIC_NAME_PATTERN.pattern}."
            )
        if own_metric.of_run is None or own_metric.of_run_at is not None or own_metric.of_cells is not None:
            raise InputError(f"{path}: the metric {own_metric.name} has no `of_run`, or has more. Allowed: metrics of one run.")
        try:
            msgspec.convert(msgspec.to_builtins(own_metric.reads), Reads | None)
        except (msgspec.ValidationError, TypeError) as error:
            raise InputError(
                f"{path}: `reads` of the metric {own_metric.name}: {error}. Needed: Reads of collect.metric."
            ) from error
    return list(metrics_value)


def _compute_own_value(file_name: str, own_metric: Metric, run: LoadedRun, faults: list[str]) -> Quantity | None:
    """The value of a metric for a run; None if the value is not known.

    If the function of the metric raises an error, or returns anything but a number in the right unit, the result is also None,
    and a sentence is added to `faults`.
    """
    assert own_metric.of_run is not None
    try:
        quantity = own_metric.of_run(run)
    except Exception as error:  # noqa: BLE001 - code of a user may raise any error
        faults.append(f"{own_code.describe_error(file_name, error)} So {own_metric.name} of {run.run_id} is not known.")
        return None
    if quantity is None:
        return None
    is_number = isinstance(quantity, Quantity) and type(quantity.value) in (int, float) and math.isfinite(quantity.value)
    if not is_number or quantity.unit != own_metric.unit:
        faults.append(
            f"{file_name}: {own_metric.name} of {run.run_id} is {str(quantity)[:80]}. Allowed: Quantity(NUMBER, "
            f"{own_metric.unit!r}), or None if it is not known."
        )
        return None
    return quantity


if __name__ == "__main__":
    main(*sys.argv[1:])
