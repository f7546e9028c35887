"""MLflow: an experiment in a file store, by its own client; the store needs no server and no database."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from collect import tracked_run
from collect.export import Export, environment, package
from collect.loading.load import Loaded
from collect.summary import Summary
from collect.tracked_run import Tracked

FOLDER = "mlruns"
STATUS = {"completed": "FINISHED", "planned": "SCHEDULED", "pending": "SCHEDULED", "running": "RUNNING", "cancelled": "KILLED",
          "preempted": "KILLED", "timeout": "KILLED"}  # fmt: skip
_KEY = re.compile(r"[^\w./ -]")  # what MLflow allows in no name
_LONGEST = 6000  # characters of a parameter
_METRICS, _PARAMS = 1000, 100  # of one request


def write(loaded: Loaded, summary: Summary, folder: Path, place: Path) -> None:
    """A file store of MLflow with one run per run. place: the final path of the folder, which MLflow writes into the files."""
    (folder / FOLDER).mkdir()  # one that is there gets no experiment besides ours
    # MLflow writes no file store without this consent: new features go into its databases, which need packages that are not
    # in the extra. `mlflow migrate-filestore` makes a database of it.
    with environment(MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_DISABLE_TELEMETRY="true"):
        client = package("mlflow.tracking").MlflowClient((folder / FOLDER).as_uri())
        experiment = client.create_experiment(
            tracked_run.name(loaded), artifact_location=(place / FOLDER / "artifacts").as_uri()
        )
        for run in tracked_run.runs(loaded, summary):
            try:
                _run(client, experiment, run)
            except package("mlflow.exceptions").MlflowException as error:
                if isinstance(error.__context__, OSError):  # the client hides what the system said, such as of a full disk
                    raise error.__context__ from error
                raise


def _run(client: Any, experiment: str, run: Tracked) -> None:
    entities = package("mlflow.entities")
    began_ms, ended_ms = (None if at is None else int(1000 * at) for at in (run.began_s, run.ended_s))
    tags = {"group": run.group, "state": run.state, "tags": ", ".join(run.tags)}
    opened = client.create_run(experiment, start_time=began_ms, run_name=run.id, tags=tags).info.run_id
    params = [entities.Param(_KEY.sub("_", key), str(value)[:_LONGEST]) for key, value in run.config.items()]
    metrics = [
        entities.Metric(name, value, int(1000 * point.wall_s), point.step)
        for point in run.points
        for name, value in point.values.items()
    ]
    metrics += [entities.Metric(f"metrics/{name}", value, ended_ms or 0, 0) for name, value in run.metrics.items()]
    for first in range(0, len(params), _PARAMS):
        client.log_batch(opened, params=params[first : first + _PARAMS])
    for first in range(0, len(metrics), _METRICS):
        client.log_batch(opened, metrics=metrics[first : first + _METRICS])
    client.set_terminated(opened, STATUS.get(run.state, "FAILED"), ended_ms)


EXPORT = Export(
    name="mlflow",
    summary="one MLflow experiment in a file store",
    holds=frozenset({FOLDER}),
    write=write,
    extra="mlflow",
    package="mlflow",
)
