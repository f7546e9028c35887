"""Executes the files of a workspace that define metrics, and computes these metrics for the runs of a matrix.

`collect.reading.own_metrics` starts this module as a separate process:
python -m collect.reading.own_metrics_process ANSWER WORKSPACE MATRIX FILE...
If MATRIX is '', the metrics are only described, and no values are computed.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import msgspec

from collect import metric
from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, Reads
from collect.reading.load import load_matrix
from collect.reading.own_metrics import DescribedMetric, OwnMetrics
from shardlab.errors import InputError
from shardlab.files import files, plugin_source
from shardlab.matrix import metric_names
from shardlab.plugins import own_code
from shardlab.workspace.workspace import Workspace

NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")


def main(answer: str, workspace: str, matrix: str, *paths: str) -> None:
    """Write the metrics, their values, and the faults to the JSON file `answer`, in the form of `OwnMetrics`.

    workspace: the path of the workspace. matrix: the name of the matrix for whose runs values are computed; '': no values.
    paths: the files that define metrics.
    """
    described: list[DescribedMetric] = []
    faults: list[str] = []
    defined: dict[str, tuple[str, Metric]] = {}  # name of a metric -> (path of the file that defines it, the metric)
    for path in map(Path, paths):
        try:
            source = plugin_source.read_plugin(path)
            for entry in _check_metrics(path, getattr(own_code.execute_plugin(source), "METRICS", None)):
                if entry.name in defined or entry.name in list_shipped_names():
                    definer = defined[entry.name][0] if entry.name in defined else "shardlab"
                    raise InputError(f"{path}: the metric {entry.name} is defined by {definer} and cannot be replaced.")
                defined[entry.name] = (str(path), entry)
                facts = (entry.name, entry.unit, entry.direction, entry.definition, entry.column)
                described.append(DescribedMetric(*facts, str(path), source.digest, entry.reads))
        except InputError as error:
            faults.append(str(error))
    values: dict[str, dict[str, Quantity]] = {}
    runs = load_matrix(Workspace(Path(workspace)), matrix).runs if matrix and defined else []
    for run in (run for run in runs if run.completed):
        run_values = {name: _compute_value(file, entry, run, faults) for name, (file, entry) in defined.items()}
        values[run.run_id] = {name: value for name, value in run_values.items() if value is not None}
    files.write_json(Path(answer), OwnMetrics(described, values, list(dict.fromkeys(faults))), sync=False)


def list_shipped_names() -> set[str]:
    """The names of the metrics of shardlab, which a workspace cannot define again."""
    return {*metric_names.KNOWN, *(shipped.name for shipped in metric.all_metrics())}


def _check_metrics(path: Path, value: object) -> list[Metric]:
    """Check the value of the variable METRICS of a file, and return its metrics as a list. path: the file. value: the value.

    Raises InputError if the value is not a tuple or list of metrics, or if a metric is not a function of one run.
    """
    if not isinstance(value, (tuple, list)) or not value or not all(isinstance(own_metric, Metric) for own_metric in value):
        raise InputError(f"{path}: METRICS is no tuple of metrics. Needed: METRICS = (Metric(...),) of collect.metric.")
    for own_metric in value:
        if not isinstance(own_metric.name, str) or not NAME.fullmatch(own_metric.name):
            raise InputError(f"{path}: {str(own_metric.name)[:40]!r} cannot be the name of a metric. Allowed: {NAME.pattern}.")
        if own_metric.of_run is None or own_metric.of_run_at is not None or own_metric.of_cells is not None:
            raise InputError(f"{path}: the metric {own_metric.name} has no `of_run`, or has more. Allowed: metrics of one run.")
        try:
            msgspec.convert(msgspec.to_builtins(own_metric.reads), Reads | None)
        except (msgspec.ValidationError, TypeError) as error:
            raise InputError(
                f"{path}: `reads` of the metric {own_metric.name}: {error}. Needed: Reads of collect.metric."
            ) from error
    return list(value)


def _compute_value(file: str, entry: Metric, run: LoadedRun, faults: list[str]) -> Quantity | None:
    """The value of a metric for a run; None if the value is not known.

    If the function of the metric raises an error, or returns anything but a number in the right unit, the result is also None,
    and a sentence is added to `faults`.
    """
    assert entry.of_run is not None
    try:
        value = entry.of_run(run)
    except Exception as error:  # noqa: BLE001 - code of a user may raise any error
        faults.append(f"{own_code.describe_error(file, error)} So {entry.name} of {run.run_id} is not known.")
        return None
    if value is None:
        return None
    is_number = isinstance(value, Quantity) and type(value.value) in (int, float) and math.isfinite(value.value)
    if not is_number or value.unit != entry.unit:
        faults.append(
            f"{file}: {entry.name} of {run.run_id} is {str(value)[:80]}. Allowed: Quantity(NUMBER, {entry.unit!r}), or None "
            "if it is not known."
        )
        return None
    return value


if __name__ == "__main__":
    main(*sys.argv[1:])
