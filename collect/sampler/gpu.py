"""GPUs through NVML, in this process: each call of nvidia-smi would start a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collect.sampler.source import Source
from shardlab.nvml import compute_processes, throttles
from shardlab.record import GpuSample, Sample


class GpuSource(Source):
    """Fills a `GpuSample` for every GPU; `why_absent` says why there is no GPU."""

    def __init__(self) -> None:
        super().__init__()
        import pynvml

        self._nvml = pynvml
        self._handles: dict[str, Any] = {}  # UUID -> NVML handle
        self.why_absent: str | None = None
        try:
            pynvml.nvmlInit()
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                self._handles[pynvml.nvmlDeviceGetUUID(handle)] = handle
        except pynvml.NVMLError as error:
            self.why_absent = f"NVML: {error}"

    def fill(self, sample: Sample) -> None:
        """Set `gpus`: one entry per GPU of this machine."""
        if self._handles:
            sample.gpus = [self._read(uuid, handle) for uuid, handle in self._handles.items()]

    def _read(self, uuid: str, handle: Any) -> GpuSample:
        nvml = self._nvml
        gpu = GpuSample(uuid=uuid)
        gpu.utilization_pct = self._ask("utilization", lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        gpu.memory_used_bytes = self._ask("memory", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used))
        gpu.power_w = self._ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)  # NVML gives milliwatts
        gpu.temperature_c = self._ask(
            "temperature", lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        )
        gpu.sm_clock_mhz = self._ask("clock", lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)))
        gpu.energy_j = self._ask("energy", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)  # from millijoules
        gpu.processes = self._ask("processes", lambda: len(compute_processes(handle)))
        gpu.throttled = self._ask("throttling", lambda: throttles(handle))
        return gpu

    def _ask(self, what: str, question: Callable[[], Any]) -> Any:
        """The answer, or None where this GPU has none."""
        try:
            return question()
        except self._nvml.NVMLError:
            self.failures[f"gpu {what}"] += 1
            return None
