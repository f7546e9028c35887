"""Metrics of the bytes that the GPUs of a run sent over NVLink and PCIe while steps were timed, from NVML's counters."""

from __future__ import annotations

from collections.abc import Callable

from collect.loading.loaded_run import LoadedRun, Quantity
from collect.metric import Metric, MetricColumn
from collect.metrics.network import counted


def _of(counter: str) -> Callable[[LoadedRun], Quantity | None]:
    def sent(run: LoadedRun) -> Quantity | None:
        """The growth of `counter`, summed over all GPUs that the run trained on; None if the growth is not known for any of
        the GPUs."""
        if run.window is None or run.clock_stepped or run.gpu_samples.is_empty():
            return None
        used = run.result.gpus if run.result else None
        if used is not None and len(run.gpu_rows.of) != len(used):
            return None  # some GPUs have no telemetry
        total = 0.0
        for values in run.gpu_rows.counters(counter).values():
            if (grown := counted(values, run.window)) is None:
                return None
            total += grown
        return Quantity(total, "bytes")

    return sent


def _metric(name: str, link: str, place: int, counter: str, more: str) -> Metric:
    return Metric(
        name=name,
        column=MetricColumn("sent", place, f"All timed steps, {link}"),
        unit="bytes",
        direction="neither",
        definition=f"Bytes that the GPUs of the run sent over {link}{more} between the first and the last timed step, by "
        "NVML's counters, which count all programs. Interpolated and blank as `network_bytes`; blank too for GPUs without such "
        "a counter.",
        of_run=_of(counter),
    )


METRICS = (
    _metric("nvlink_bytes", "NVLink", 52, "nvlink_tx_bytes", ", without protocol overhead,"),
    _metric("pcie_bytes", "PCIe", 54, "pcie_tx_bytes", ""),
)
