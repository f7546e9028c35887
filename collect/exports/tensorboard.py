"""Exports runs to TensorBoard, one event file per run. TensorBoard's own writer writes it, without PyTorch or TensorFlow."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collect import tracked_run
from collect.export import Export, import_package
from collect.reading.load import LoadedMatrix
from collect.summary import Summary
from collect.tracked_run import TrackedRun, TrackedStep

FORMAT_VERSION = "brain.Event:2"  # file format; the first event of a file states it (tensorflow/core/util/event.proto)


def write(loaded: LoadedMatrix, summary: Summary, folder: Path, _final_path: Path) -> None:
    """Write one TensorBoard event file for each run."""
    for run in tracked_run.list_tracked_runs(loaded, summary):
        with contextlib.closing(EventFile(run, folder / "runs")) as event_file:
            event_file.log(run.timed_steps)
            event_file.end(run)


class EventFile:
    """The TensorBoard event file of a run: first the cell as hyper-parameters, then values by step, then final metrics and
    status."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        self._event = import_package("tensorboard.compat.proto.event_pb2").Event
        path = folder / run.id / f"events.out.tfevents.{int(run.began_s or 0)}.{run.id}"
        path.parent.mkdir(parents=True)
        self._handle = path.open("xb")
        self._records = import_package("tensorboard.summary.writer.record_writer").RecordWriter(self._handle)
        try:
            self._begin(run)
        except OSError:
            self.close()
            raise

    def log(self, points: Sequence[TrackedStep]) -> None:
        """Write the values of steps. points: the steps, each with its number, its time, and its values by name."""
        for point in points:
            self._write(wall_time=point.wall_s, step=point.step, summary=_scalar_values(point.values))
        self._records.flush()

    def end(self, run: TrackedRun) -> None:
        """Write the final metrics and whether the run completed, and close the file."""
        ended_s, metrics = run.ended_s or 0.0, {f"metrics/{name}": value for name, value in run.metrics.items()}
        self._write(wall_time=ended_s, step=0, summary=_scalar_values(metrics))
        self._write(wall_time=ended_s, summary=_session_end(run, ended_s))
        self._records.flush()
        self.close()

    def close(self) -> None:
        """Close the file. If the disk is full, the data that does not fit is lost without an error."""
        with contextlib.suppress(OSError):
            self._handle.close()

    def _begin(self, run: TrackedRun) -> None:
        """Write the version of the file format and the keys of the cell."""
        began_s, hparams = run.began_s or 0.0, import_package("tensorboard.plugins.hparams.summary_v2")
        self._write(wall_time=began_s, file_version=FORMAT_VERSION)
        simple_values = {key: value for key, value in run.config.items() if isinstance(value, bool | int | float | str)}
        self._write(wall_time=began_s, summary=hparams.hparams_pb(simple_values, trial_id=run.id, start_time_secs=began_s))
        self._records.flush()

    def _write(self, **event_fields: Any) -> None:
        self._records.write(self._event(**event_fields).SerializeToString())


def follow(_project: str, run: TrackedRun, folder: Path) -> EventFile:
    """Open a new event file for a run that is still going on. An earlier event file of the run is removed.

    folder: the folder for all runs that are followed; the event file lies in its folder `tensorboard/RUN_ID`.
    """
    shutil.rmtree(folder / "tensorboard" / run.id, ignore_errors=True)
    return EventFile(run, folder / "tensorboard")


def _scalar_values(values: dict[str, float]) -> Any:
    summary_type = import_package("tensorboard.compat.proto.summary_pb2").Summary
    return summary_type(value=[summary_type.Value(tag=name, simple_value=value) for name, value in values.items()])


def _session_end(run: TrackedRun, ended_s: float) -> Any:
    """A message that says how and when a run ended.

    It equals the message of tensorboard.plugins.hparams.summary.session_end_pb, which is not called because its module needs
    TensorFlow.
    """
    api, metadata, data = (
        import_package(f"tensorboard.plugins.hparams.{name}") for name in ("api_pb2", "metadata", "plugin_data_pb2")
    )
    status = api.STATUS_SUCCESS if run.state == "completed" else api.STATUS_FAILURE
    run_end = data.HParamsPluginData(session_end_info=data.SessionEndInfo(status=status, end_time_secs=ended_s))
    summary_type = import_package("tensorboard.compat.proto.summary_pb2").Summary
    summary_value = summary_type.Value(
        tag=metadata.SESSION_END_INFO_TAG, metadata=metadata.create_summary_metadata(run_end), tensor=metadata.NULL_TENSOR
    )
    return summary_type(value=[summary_value])


EXPORT = Export(
    name="tensorboard",
    summary="one event file per run, for tensorboard --logdir",
    written_names=frozenset({"runs"}),
    write=write,
    package="tensorboard",
    follow=follow,
)
