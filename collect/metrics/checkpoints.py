"""Metrics of checkpoints: how long it takes to save and to load one, and its size (the instrument `checkpoints`)."""

from __future__ import annotations

from collections.abc import Callable

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn


def make_checkpoint_function(name: str, unit: str) -> Callable[[LoadedRun], Quantity | None]:
    """Make a metric's function, which returns the number `name` of the results that the instrument `checkpoints` recorded."""

    def of_run(run: LoadedRun) -> Quantity | None:
        value = run.result.instruments.get("checkpoints", {}).get(name) if run.result else None
        return None if value is None else Quantity(value, unit)

    return of_run


METRICS = (
    Metric(
        name="checkpoint_save_s",
        column=MetricColumn("times", 40, "Save a checkpoint"),
        unit="s",
        direction="lower is better",
        definition="Mean time of rank 0 to save a checkpoint, until all ranks have saved it and its files are synced to the "
        "disk (docs/checkpoints.md).",
        of_run=make_checkpoint_function("save_s", "s"),
    ),
    Metric(
        name="checkpoint_load_s",
        column=MetricColumn("times", 50, "Load a checkpoint"),
        unit="s",
        direction="lower is better",
        definition="Time of rank 0 to load a checkpoint, until all ranks have loaded it, without the check of its checksums. "
        "Of a run that resumed, or with `time_loading: true`. The files may still be in the memory of the host.",
        of_run=make_checkpoint_function("load_s", "s"),
    ),
    Metric(
        name="checkpoint_bytes",
        column=MetricColumn("memory", 100, "Checkpoint"),
        unit="bytes",
        direction="lower is better",
        definition="Size of all files of the last checkpoint on the disk.",
        of_run=make_checkpoint_function("bytes", "bytes"),
    ),
)
