"""TensorBoard: one event file per run, written by TensorBoard's own writer; needs neither PyTorch nor TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from collect import tracked_run
from collect.export import Export, package
from collect.loading.load import Loaded
from collect.summary import Summary
from collect.tracked_run import Tracked

VERSION = "brain.Event:2"  # the first event of every file: tensorflow/core/util/event.proto


def write(loaded: Loaded, summary: Summary, folder: Path, _place: Path) -> None:
    """One event file of TensorBoard per run."""
    writer = package("tensorboard.summary.writer.record_writer")
    for run in tracked_run.runs(loaded, summary):
        path = folder / "runs" / run.id / f"events.out.tfevents.{int(run.began_s or 0)}.{run.id}"
        path.parent.mkdir(parents=True)
        with path.open("wb") as handle:
            records = writer.RecordWriter(handle)
            for event in _events(run):
                records.write(event.SerializeToString())
            records.flush()


def _events(run: Tracked) -> Iterable[Any]:
    """The scalars of each step; then the cell as hyper-parameters with what the run came to as their metrics."""
    event = package("tensorboard.compat.proto.event_pb2").Event
    hparams = package("tensorboard.plugins.hparams.summary_v2")
    began_s, ended_s = run.began_s or 0.0, run.ended_s or 0.0
    yield event(wall_time=began_s, file_version=VERSION)
    known = {key: value for key, value in run.config.items() if isinstance(value, bool | int | float | str)}
    yield event(wall_time=began_s, summary=hparams.hparams_pb(known, trial_id=run.id, start_time_secs=began_s))
    for point in run.points:
        yield event(wall_time=point.wall_s, step=point.step, summary=_scalars(point.values))
    yield event(wall_time=ended_s, step=0, summary=_scalars({f"metrics/{name}": one for name, one in run.metrics.items()}))
    yield event(wall_time=ended_s, summary=_end(run, ended_s))


def _scalars(values: dict[str, float]) -> Any:
    summary = package("tensorboard.compat.proto.summary_pb2").Summary
    return summary(value=[summary.Value(tag=name, simple_value=value) for name, value in values.items()])


def _end(run: Tracked, ended_s: float) -> Any:
    """What tensorboard.plugins.hparams.summary.session_end_pb makes, which only TensorFlow can import."""
    api, metadata, data = (
        package(f"tensorboard.plugins.hparams.{name}") for name in ("api_pb2", "metadata", "plugin_data_pb2")
    )
    status = api.STATUS_SUCCESS if run.state == "completed" else api.STATUS_FAILURE
    told = data.HParamsPluginData(session_end_info=data.SessionEndInfo(status=status, end_time_secs=ended_s))
    summary = package("tensorboard.compat.proto.summary_pb2").Summary
    value = summary.Value(
        tag=metadata.SESSION_END_INFO_TAG, metadata=metadata.create_summary_metadata(told), tensor=metadata.NULL_TENSOR
    )
    return summary(value=[value])


EXPORT = Export(
    name="tensorboard",
    summary="one event file per run, for tensorboard --logdir",
    holds=frozenset({"runs"}),
    write=write,
    extra="tensorboard",
    package="tensorboard",
)
