"""Metrics of checkpoints: how long it takes to save and to load one, and its size (the instrument `checkpoints`)."""

from __future__ import annotations

from collect.metric import MetricColumn
from collect.metric_values import make_result_metric

METRICS = (
    make_result_metric(
        "instruments.checkpoints.save_s",
        name="checkpoint_save_s",
        column=MetricColumn("times", 40, "Save a checkpoint"),
        unit="s",
        direction="lower is better",
        definition="Mean time of rank 0 to save a checkpoint, until all ranks have saved it and its files are synced to the "
        "disk (docs/checkpoints.md).",
    ),
    make_result_metric(
        "instruments.checkpoints.load_s",
        name="checkpoint_load_s",
        column=MetricColumn("times", 50, "Load a checkpoint"),
        unit="s",
        direction="lower is better",
        definition="Time of rank 0 to load a checkpoint, until all ranks have loaded it, without the check of its checksums. "
        "Of a run that resumed, or with `time_loading: true`. The files may still be in the memory of the host.",
    ),
    make_result_metric(
        "instruments.checkpoints.bytes",
        name="checkpoint_bytes",
        column=MetricColumn("memory", 100, "Checkpoint"),
        unit="bytes",
        direction="lower is better",
        definition="Size of all files of the last checkpoint on the disk.",
    ),
)
