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
from collect.metric import Metric, MetricColumn
from collect.reading.load import Loaded
from shardlab.errors import InputError
from shardlab.files import files, plugin_source
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

FOLDER = "metrics"
ANSWER_S = 3600  # time limit in seconds of the separate process, which itself reads all records of the matrix


class DescribedMetric(msgspec.Struct, frozen=True):
    """A metric that the workspace defines, without its function."""

    name: str
    unit: str
    direction: metric.Direction
    definition: str
    column: MetricColumn | None
    file: str  # the path of the file that defines the metric
    code: str  # a digest of the file's source code


class OwnMetrics(msgspec.Struct, frozen=True):
    """The metrics that a workspace defines itself, and their values for the runs of a matrix."""

    metrics: list[DescribedMetric] = []
    values: dict[str, dict[str, Quantity]] = {}  # run id -> metric name -> value
    faults: list[str] = []  # why files define no metric, or why metrics have no value: one sentence for each fault

    def remarks(self) -> list[str]:
        """The remarks for a report: which file computed which metrics, and which metrics could not be computed."""
        by_code: dict[tuple[str, str], list[str]] = {}
        for one in self.metrics:
            by_code.setdefault((one.file, one.code), []).append(one.name)
        made = [
            f"own metrics of the workspace: {', '.join(names)} by {file} (digest {code})"
            for (file, code), names in by_code.items()
        ]
        return [*made, *self.faults]

    def on_menu(self) -> None:
        """Add these metrics, without their functions, to `collect.metric.menu`. They replace the metrics of an earlier call."""
        metric.set_own([
            Metric(name=o.name, unit=o.unit, direction=o.direction, definition=o.definition, column=o.column)
            for o in self.metrics
        ])  # fmt: skip

    def add_to(self, loaded: Loaded) -> None:
        """Add these metrics to `collect.metric.menu`, and their values to the runs of `loaded`."""
        self.on_menu()
        for run in loaded.runs:
            if run.run_id in self.values:
                run.quantities = metric.quantities(run) | self.values[run.run_id]


def of(workspace: Workspace, matrix: str | None, *, owner: Workspace | None = None) -> OwnMetrics:
    """The metrics that the workspace defines itself, and their values for the runs of a matrix.

    matrix: the name of the matrix; None: no values are computed. owner: the workspace of which `workspace` is a copy, if it
    is one. If the user may not act in the owner (shardlab.workspace.workspace_trust), no file is executed, and
    `faults` of the result says so. Raises WorkspaceError if a file of the workspace cannot be read.
    """
    found = plugin_source.files_in(workspace.path / FOLDER)
    if not found:
        return OwnMetrics()
    try:
        workspace_trust.must_be_allowed(owner or workspace, f"execute {found[0]}")
    except InputError as error:
        return OwnMetrics(faults=[str(error)])
    return _computed_in_process(workspace, matrix, found)


def _computed_in_process(workspace: Workspace, matrix: str | None, found: Sequence[Path]) -> OwnMetrics:
    with tempfile.TemporaryDirectory(prefix="shardlab-own-") as folder:
        answer = Path(folder) / "answer.json"
        words = [str(answer), str(workspace.path), matrix or "", *map(str, found)]
        argv = [sys.executable, "-P", "-m", "collect.reading.own_metrics_process", *words]
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, cwd=folder, timeout=ANSWER_S, check=False
            )
            return msgspec.json.decode(files.read(answer), type=OwnMetrics)
        except subprocess.TimeoutExpired:
            return OwnMetrics(faults=[f"{workspace.path / FOLDER}: its code did not end within {ANSWER_S} s."])
        except (OSError, *DECODE_FAULTS):
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            why = said[-1] if said else f"the process ended with code {done.returncode}"
            return OwnMetrics(faults=[f"{workspace.path / FOLDER}: its metrics cannot be computed: {why}"])
