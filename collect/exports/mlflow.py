"""Exports runs to MLflow: one experiment in a file store, which needs no server and no database.

MLflow's own client writes the file store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from collect import tracked_run
from collect.export import Export, import_package, set_environment_variables
from collect.reading.load import LoadedMatrix
from collect.summary import Summary
from collect.tracked_run import TrackedRun, TrackedStep
from shardlab.files import files

STORE_FOLDER = "mlruns"
STATUS_BY_STATE = {"completed": "FINISHED", "planned": "SCHEDULED", "pending": "SCHEDULED", "running": "RUNNING",
    "cancelled": "KILLED",           "preempted": "KILLED", "timeout": "KILLED"}  # fmt: skip
# MLflow writes a file store only if MLFLOW_ALLOW_FILE_STORE is set, because its new features need a database. A database needs
# packages that are not in the extra. `mlflow migrate-filestore` converts the file store into a database.
_ENVIRONMENT = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
_NOT_ALLOWED_IN_NAME = re.compile(r"[^\w./ -]")  # characters that MLflow does not allow in names
_MAX_VALUE_CHARS = 6000  # the most characters of a parameter's value that MLflow stores
_METRICS_PER_REQUEST, _PARAMS_PER_REQUEST = 1000, 100  # the most metrics and parameters that MLflow accepts in one request


def write_experiment(loaded: LoadedMatrix, summary: Summary, folder: Path, final_path: Path) -> None:
    """Write a file store of MLflow with one MLflow run for each run of the matrix.

    final_path: the final path of `folder`, which MLflow writes into its files, because `folder` is renamed when it is complete.
    """
    (folder / STORE_FOLDER).mkdir()  # if the folder exists, MLflow does not add its default experiment to it
    with set_environment_variables(**_ENVIRONMENT):
        client = import_package("mlflow.tracking").MlflowClient((folder / STORE_FOLDER).as_uri())
        experiment_id = client.create_experiment(
            tracked_run.get_experiment_name(loaded), artifact_location=(final_path / STORE_FOLDER / "artifacts").as_uri()
        )
        for run in tracked_run.list_tracked_runs(loaded, summary):
            try:
                mlflow_run = MlflowRun(client, experiment_id, run)
                mlflow_run.log(run.timed_steps)
                mlflow_run.end(run)
            except import_package("mlflow.exceptions").MlflowException as error:
                # If the client could not write, e.g. because the disk is full, its error does not say so; the OSError does.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from error
                raise


class MlflowRun:
    """An MLflow run that is open, so that values of a run of the matrix can be logged to it."""

    def __init__(self, client: Any, experiment_id: str, run: TrackedRun) -> None:
        self._client, self._entities = client, import_package("mlflow.entities")
        self._config: dict[str, Any] = {}
        began_ms = None if run.began_s is None else int(1000 * run.began_s)
        self._id = client.create_run(experiment_id, start_time=began_ms, run_name=run.id, tags=_make_run_tags(run)).info.run_id
        self._state = run.state
        self._log_parameters(run.config)

    def log(self, tracked_steps: Sequence[TrackedStep]) -> None:
        """Log the values of steps. tracked_steps: the steps, each with its number, its time, and its values by name."""
        self._log_metrics(
            self._entities.Metric(_NOT_ALLOWED_IN_NAME.sub("_", metric_name), metric_value, int(1000 * step.wall_s), step.step)
            for step in tracked_steps
            for metric_name, metric_value in step.values.items()
        )

    def end(self, run: TrackedRun) -> None:
        """Write the metrics, the status, and the tags and parameters that changed since the MLflow run was opened; then
        close it."""
        ended_ms = None if run.ended_s is None else int(1000 * run.ended_s)
        self._log_parameters({key: value for key, value in run.config.items() if key not in self._config})
        if run.state != self._state:
            for key, value in _make_run_tags(run).items():
                self._client.set_tag(self._id, key, value)
        self._log_metrics(
            self._entities.Metric(f"metrics/{metric}", value, ended_ms or 0, 0) for metric, value in run.metrics.items()
        )
        self._client.set_terminated(self._id, STATUS_BY_STATE.get(run.state, "FAILED"), ended_ms)

    def _log_parameters(self, new_config: dict[str, Any]) -> None:
        self._config |= new_config
        parameters = [
            self._entities.Param(_NOT_ALLOWED_IN_NAME.sub("_", key), str(value)[:_MAX_VALUE_CHARS])
            for key, value in new_config.items()
        ]
        for first_index in range(0, len(parameters), _PARAMS_PER_REQUEST):
            self._client.log_batch(self._id, params=parameters[first_index : first_index + _PARAMS_PER_REQUEST])

    def _log_metrics(self, mlflow_metrics: Iterable[Any]) -> None:
        metric_list = list(mlflow_metrics)
        for first_index in range(0, len(metric_list), _METRICS_PER_REQUEST):
            self._client.log_batch(self._id, metrics=metric_list[first_index : first_index + _METRICS_PER_REQUEST])


def _make_run_tags(run: TrackedRun) -> dict[str, str]:
    return {"group": run.group, "state": run.state, "tags": ", ".join(run.tags)}


def follow_run(project: str, run: TrackedRun, folder: Path) -> MlflowRun:
    """Open an MLflow run for a run that is still going on, and delete an earlier MLflow run with the same id.

    The MLflow run is stored in a file store that all runs share, or in the store that MLFLOW_TRACKING_URI names.
    """
    os.environ |= _ENVIRONMENT
    (folder / STORE_FOLDER).mkdir(parents=True, exist_ok=True)
    client = import_package("mlflow.tracking").MlflowClient(
        os.environ.get("MLFLOW_TRACKING_URI") or (folder / STORE_FOLDER).as_uri()
    )
    with files.hold_lock(folder / "mlflow.lock"):  # without a lock, two processes could create the same experiment twice
        existing_experiment = client.get_experiment_by_name(project)
        experiment = existing_experiment.experiment_id if existing_experiment is not None else client.create_experiment(project)
    for earlier_run in client.search_runs([experiment], f"attributes.run_name = '{run.id}'"):
        client.delete_run(earlier_run.info.run_id)
    return MlflowRun(client, experiment, run)


EXPORT = Export(
    name="mlflow",
    summary="one MLflow experiment in a file store",
    written_names=frozenset({STORE_FOLDER}),
    write=write_experiment,
    package="mlflow",
    follow=follow_run,
)
