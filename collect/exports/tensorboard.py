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


def write_event_files(loaded: LoadedMatrix, summary: Summary, folder: Path, _final_path: Path) -> None:
    """Write one TensorBoard event file for each run."""
    for run in tracked_run.list_tracked_runs(loaded, summary):
        with contextlib.closing(EventFile(run, folder / "runs")) as event_file:
            event_file.log(run.timed_steps)
            event_file.end(run)


class EventFile:
    """The TensorBoard event file of a run: first the cell as hyper-parameters, then values by step, then final metrics and
    status."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        self._event_type = import_package("tensorboard.compat.proto.event_pb2").Event
        event_path = folder / run.id / f"events.out.tfevents.{int(run.began_s or 0)}.{run.id}"
        event_path.parent.mkdir(parents=True)
        self._file_handle = event_path.open("xb")
        self._record_writer = import_package("tensorboard.summary.writer.record_writer").RecordWriter(self._file_handle)
        try:
            self._write_cell(run)
        except OSError:
            self.close()
            raise

    def log(self, tracked_steps: Sequence[TrackedStep]) -> None:
        """Write the values of steps. tracked_steps: the steps, each with its number, its time, and its values by name."""
        for step in tracked_steps:
            self._write_event(wall_time=step.wall_s, step=step.step, summary=_make_scalar_values(step.values))
        self._record_writer.flush()

    def end(self, run: TrackedRun) -> None:
        """Write the final metrics and whether the run completed, and close the file."""
        ended_s, metrics = run.ended_s or 0.0, {f"metrics/{name}": value for name, value in run.metrics.items()}
        self._write_event(wall_time=ended_s, step=0, summary=_make_scalar_values(metrics))
        self._write_event(wall_time=ended_s, summary=_make_session_end(run, ended_s))
        self._record_writer.flush()
        self.close()

    def close(self) -> None:
        """Close the file. If the disk is full, the data that does not fit is lost without an error."""
        with contextlib.suppress(OSError):
            self._file_handle.close()

    def _write_cell(self, run: TrackedRun) -> None:
        """Write the version of the file format and the keys of the cell."""
        began_s, hparams_module = run.began_s or 0.0, import_package("tensorboard.plugins.hparams.summary_v2")
        self._write_event(wall_time=began_s, file_version=FORMAT_VERSION)
        simple_values = {key: value for key, value in run.config.items() if isinstance(value, bool | int | float | str)}
        self._write_event(
            wall_time=began_s, summary=hparams_module.hparams_pb(simple_values, trial_id=run.id, start_time_secs=began_s)
        )
        self._record_writer.flush()

    def _write_event(self, **event_fields: Any) -> None:
        self._record_writer.write(self._event_type(**event_fields).SerializeToString())


def follow_run(_project: str, run: TrackedRun, folder: Path) -> EventFile:
    """Open a new event file for a run that is still going on. An earlier event file of the run is removed.

    folder: the folder for all runs that are followed; the event file lies in its folder `tensorboard/RUN_ID`.
    """
    shutil.rmtree(folder / "tensorboard" / run.id, ignore_errors=True)
    return EventFile(run, folder / "tensorboard")


def _make_scalar_values(value_by_name: dict[str, float]) -> Any:
    summary_type = import_package("tensorboard.compat.proto.summary_pb2").Summary
    return summary_type(value=[summary_type.Value(tag=name, simple_value=value) for name, value in value_by_name.items()])


def _make_session_end(run: TrackedRun, ended_s: float) -> Any:
    """A message that says how and when a run ended.

    It equals the message of tensorboard.plugins.hparams.summary.session_end_pb, which is not called because its module needs
    TensorFlow.
    """
    api_module, metadata, data_module = (
        import_package(f"tensorboard.plugins.hparams.{name}") for name in ("api_pb2", "metadata", "plugin_data_pb2")
    )
    status = api_module.STATUS_SUCCESS if run.state == "completed" else api_module.STATUS_FAILURE
    run_end = data_module.HParamsPluginData(session_end_info=data_module.SessionEndInfo(status=status, end_time_secs=ended_s))
    summary_type = import_package("tensorboard.compat.proto.summary_pb2").Summary
    summary_value = summary_type.Value(
        tag=metadata.SESSION_END_INFO_TAG, metadata=metadata.create_summary_metadata(run_end), tensor=metadata.NULL_TENSOR
    )
    return summary_type(value=[summary_value])


EXPORT = Export(
    name="tensorboard",
    summary="one event file per run, for tensorboard --logdir",
    written_names=frozenset({"runs"}),
    write=write_event_files,
    package="tensorboard",
    follow=follow_run,
)
