"""Metrics of the bytes that the GPUs of a run sent over NVLink and PCIe while steps were timed, from NVML's counters."""

from __future__ import annotations

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn, Reads
from collect.metrics.network import measure_counter_growth


def _sum_counter_growth(run: LoadedRun, counter_column: str) -> Quantity | None:
    """The growth of `counter_column`, summed over all GPUs that the run trained on; None if the growth is not known for any of
    the GPUs."""
    if run.timed_window is None or run.clock_stepped or run.gpu_samples.is_empty():
        return None
    run_gpus = run.result.gpus if run.result else None
    if run_gpus is not None and len(run.gpu_rows.rows_by_device) != len(run_gpus):
        return None  # some GPUs have no telemetry
    growths = [
        measure_counter_growth(counter, run.timed_window) for counter in run.gpu_rows.get_counters(counter_column).values()
    ]
    known_growths = [growth for growth in growths if growth is not None]
    return Quantity(sum(known_growths, 0.0), "bytes") if len(known_growths) == len(growths) else None


def _build_link_metric(name: str, link: str, position: int, counter_column: str, remark: str) -> Metric:
    return Metric(
        name=name,
        column=MetricColumn("sent", position, f"All timed steps, {link}"),
        unit="bytes",
        direction="neither",
        definition=f"Bytes that the GPUs of the run sent over {link}{remark} between the first and the last timed "
        "step, by NVML's counters, which count all programs. Interpolated and blank as `network_bytes`; blank too for "
        "GPUs without such a counter.",
        of_run=lambda run: _sum_counter_growth(run, counter_column),
        reads=Reads(samples="window", result=("gpus",)),
    )


METRICS = (
    _build_link_metric("nvlink_bytes", "NVLink", 52, "nvlink_tx_bytes", ", without protocol overhead,"),
    _build_link_metric("pcie_bytes", "PCIe", 54, "pcie_tx_bytes", ""),
)
