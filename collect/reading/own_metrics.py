"""Computes the metrics that a workspace defines itself (docs/own-models.md) in WORKSPACE/metrics/NAME.py, in a tuple METRICS.

A separate process (`collect.reading.own_metrics_process`) executes the files and computes the values, so that an error in a
file does not end the command. The files are executed only if the workspace is trusted, because they may come from somebody
else, for example in an archive."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from collect import metric
from collect.loading.loaded_run import Quantity
from collect.metric import Metric, MetricColumn, Reads
from collect.reading.load import Loaded
from shardlab.errors import InputError
from shardlab.files import files, plugin_source
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

FOLDER = "metrics"
TIME_LIMIT_S = 3600  # time limit in seconds of the separate process, which itself reads all records of the matrix


class DescribedMetric(msgspec.Struct, frozen=True):
    """A metric that the workspace defines, without its function."""

    name: str
    unit: str
    direction: metric.Direction
    definition: str
    column: MetricColumn | None
    file: str
    """The path of the file that defines the metric."""
    code: str
    """A digest of the file's source code."""
    reads: Reads | None
    """What the metric reads of a run; None: not declared."""


class OwnMetrics(msgspec.Struct, frozen=True):
    """The metrics that a workspace defines itself, and their values for the runs of a matrix."""

    metrics: list[DescribedMetric] = []
    values: dict[str, dict[str, Quantity]] = {}
    """Run id -> metric name -> value."""
    faults: list[str] = []
    """Why files define no metric, or why metrics have no value: one sentence for each fault."""

    def remarks(self) -> list[str]:
        """The remarks for a report: which file computed which metrics, and which metrics could not be computed."""
        by_code: dict[tuple[str, str], list[str]] = {}
        for described in self.metrics:
            by_code.setdefault((described.file, described.code), []).append(described.name)
        texts = [
            f"own metrics of the workspace: {', '.join(names)} by {file} (digest {code})"
            for (file, code), names in by_code.items()
        ]
        return [*texts, *self.faults]

    def add_to_menu(self) -> None:
        """Add these metrics, without their functions, to `collect.metric.all_metrics`. They replace those of earlier calls."""
        metric.set_workspace_metrics([
            Metric(name=o.name, unit=o.unit, direction=o.direction, definition=o.definition, column=o.column, reads=o.reads)
            for o in self.metrics
        ])  # fmt: skip

    def add_to(self, loaded: Loaded) -> None:
        """Add these metrics to `collect.metric.all_metrics`, and their values to the runs of `loaded`."""
        self.add_to_menu()
        for run in loaded.runs:
            if run.run_id in self.values:
                run.quantities = metric.compute_quantities(run) | self.values[run.run_id]


def compute_own_metrics(workspace: Workspace, matrix: str | None, *, owner: Workspace | None = None) -> OwnMetrics:
    """The metrics that the workspace defines itself, and their values for the runs of a matrix.

    matrix: the name of the matrix; None: no values are computed. owner: the workspace of which `workspace` is a copy, if it
    is one. If the user may not act in the owner (shardlab.workspace.workspace_trust), no file is executed, and
    `faults` of the result says so. Raises WorkspaceError if a file of the workspace cannot be read.
    """
    paths = plugin_source.plugin_files(workspace.path / FOLDER)
    if not paths:
        return OwnMetrics()
    try:
        workspace_trust.must_be_allowed(owner or workspace, f"execute {paths[0]}")
    except InputError as error:
        return OwnMetrics(faults=[str(error)])
    return _compute_in_process(workspace, matrix, paths)


def _compute_in_process(workspace: Workspace, matrix: str | None, paths: Sequence[Path]) -> OwnMetrics:
    with tempfile.TemporaryDirectory(prefix="shardlab-own-") as folder:
        answer = Path(folder) / "answer.json"
        arguments = [str(answer), str(workspace.path), matrix or "", *map(str, paths)]
        argv = [sys.executable, "-P", "-m", "collect.reading.own_metrics_process", *arguments]
        try:
            process = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, cwd=folder, timeout=TIME_LIMIT_S, check=False
            )
            return msgspec.json.decode(files.read(answer), type=OwnMetrics)
        except subprocess.TimeoutExpired:
            return OwnMetrics(faults=[f"{workspace.path / FOLDER}: its code did not end within {TIME_LIMIT_S} s."])
        except (OSError, *DECODE_FAULTS):
            error_lines = process.stderr.decode("utf-8", "replace").strip().splitlines()
            why = error_lines[-1] if error_lines else f"the process ended with code {process.returncode}"
            return OwnMetrics(faults=[f"{workspace.path / FOLDER}: its metrics cannot be computed: {why}"])
