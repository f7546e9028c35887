"""GPUs through NVML, in process: a poll of nvidia-smi costs a process start at every tick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collect.sampler.source import Source
from shardlab.record import GpuSample, Sample


class GpuSource(Source):
    """Utilization, memory, power, temperature and clock of every GPU; `why_absent` says why there is none."""

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
        return gpu

    def _ask(self, what: str, question: Callable[[], Any]) -> Any:
        """The answer, or None where this GPU has none."""
        try:
            return question()
        except self._nvml.NVMLError:
            self.failures[f"gpu {what}"] += 1
            return None
