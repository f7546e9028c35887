"""Samples GPUs through NVML, the management library of NVIDIA, in the process of the sampler.

If a GPU does not support a query, the query is tried once and not repeated for every sample.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from collect.sampler.source import TelemetrySource
from shardlab.errors import InputError
from shardlab.hardware.nvml import read_compute_processes, read_throttle_reasons
from shardlab.runs.record import GpuSample, Sample

KIB = 1024
MOST_EVENTS = 64  # the most events that one sample reads: a faulty GPU may report errors faster than they can be read
ALL_LINKS = 0xFFFFFFFF  # the scope with which NVML returns the sum over all NVLinks of a GPU
UNSIGNED_INT_TYPE = 1
# The members of NVML's union for values (nvmlValue_t). The number `valueType` of a value is the index of its member here.
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class GpuQuery(NamedTuple):
    """A query for which NVML has its own function, such as nvmlDeviceGetPowerUsage."""

    name: str
    """The key of this query in `failures` and `unsupported`."""
    sample_field: str
    """The field of GpuSample that gets the answer."""
    ask_gpu: Callable[[Any], Any]
    """Takes the NVML handle of a GPU, and returns the answer."""


class FieldQuery(NamedTuple):
    """A query by the number of an NVML field, as in `GpuQuery`. One call of nvmlDeviceGetFieldValues answers many of them."""

    name: str
    sample_field: str
    field_id: int
    """The number of the NVML field."""
    scope: int
    unit_factor: int
    """By which the answer is multiplied, such as KIB."""


class SampledGpu(msgspec.Struct):
    """A GPU or a MIG instance that is sampled."""

    uuid: str
    handle: Any
    """Its NVML handle."""
    queries: list[GpuQuery]
    """The queries that NVML has not refused for this GPU so far; the same holds for `field_queries`."""
    field_queries: list[FieldQuery]
    mig_of: str | None = None
    """The UUID of the GPU to which a MIG instance belongs; None for a GPU."""
    is_lost: bool = False

    @property
    def address(self) -> int | None:
        """The address in the NVML handle, by which an event of NVML says which GPU it is about."""
        return ctypes.cast(self.handle, ctypes.c_void_p).value


class GpuSource(TelemetrySource):
    """Adds a `GpuSample` for every GPU and MIG instance to each sample.

    why_absent: why NVML cannot be used; None if NVML can be used.
    """

    def __init__(self, stub_file: Path | None = None) -> None:
        """Open NVML and all GPUs. Raises InputError if a stub of NVML cannot be loaded.

        stub_file: a stub of NVML, which makes up GPUs and their values, so that all samples are marked as played. None: the
        library of the driver is used.
        """
        super().__init__()
        import pynvml

        self._nvml, self._is_played, self._is_first_sample = pynvml, stub_file is not None, True
        if stub_file is not None:
            try:
                pynvml.nvmlLib = ctypes.CDLL(str(stub_file.absolute()))
            except OSError as error:
                raise InputError(f"--played: {error}. Allowed: a shared library with NVML's functions.") from None
        self._permanent_errors = {
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            pynvml.NVML_ERROR_NO_PERMISSION,
            pynvml.NVML_ERROR_INVALID_ARGUMENT,
        }
        self._gpus: list[SampledGpu] = []
        self._event_set: Any = None
        self.why_absent: str | None = None
        try:
            pynvml.nvmlInit()
            gpu_count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self.why_absent = f"NVML: {error}"
            return
        for gpu_index in range(gpu_count):
            try:
                self._open_gpu(pynvml.nvmlDeviceGetHandleByIndex(gpu_index))
            except pynvml.NVMLError as error:  # this GPU is not sampled, but the other GPUs are
                self.remarks.append(f"GPU {gpu_index} cannot be sampled: {error}")
        self._register_events()

    def fill(self, sample: Sample) -> None:
        """Set the field `gpus` of the sample: one entry per GPU and MIG instance of this machine."""
        if self._gpus:
            xids_by_address = self._read_xids() if self._event_set is not None else {}
            sample.gpus = [self._read_gpu(gpu, xids_by_address) for gpu in self._gpus]
            self._is_first_sample = False

    def _open_gpu(self, gpu_handle: Any) -> None:
        """Start to sample a GPU and its MIG instances. Raises NVMLError if NVML does not return the UUID of the GPU."""
        nvml = self._nvml
        uuid = nvml.nvmlDeviceGetUUID(gpu_handle)
        queries = [*self._list_instance_queries(), *self._list_gpu_queries()]
        self._gpus.append(SampledGpu(uuid, gpu_handle, queries, self._list_field_queries()))
        try:
            if nvml.nvmlDeviceGetMigMode(gpu_handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
                return
            most_instances = nvml.nvmlDeviceGetMaxMigDeviceCount(gpu_handle)
        except nvml.NVMLError:
            return
        for instance_index in range(most_instances):
            try:
                instance_handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu_handle, instance_index)
                instance_uuid = nvml.nvmlDeviceGetUUID(instance_handle)
                self._gpus.append(SampledGpu(instance_uuid, instance_handle, self._list_instance_queries(), [], mig_of=uuid))
            except nvml.NVMLError:  # there is no instance with this index
                continue

    def _list_instance_queries(self) -> list[GpuQuery]:
        """The queries that both GPUs and MIG instances support. Power, clocks and utilization are known only for whole GPUs."""
        nvml = self._nvml
        return [
            GpuQuery("memory", "memory_used_bytes", lambda gpu_handle: int(nvml.nvmlDeviceGetMemoryInfo(gpu_handle).used)),
            GpuQuery("processes", "processes", lambda gpu_handle: len(read_compute_processes(gpu_handle))),
        ]

    def _list_gpu_queries(self) -> list[GpuQuery]:
        nvml = self._nvml
        sm_clock, memory_clock, gpu_sensor = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM, nvml.NVML_TEMPERATURE_GPU
        read_energy_mj = nvml.nvmlDeviceGetTotalEnergyConsumption
        return [
            GpuQuery("utilization", "utilization_pct", lambda gpu: float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)),
            GpuQuery("power", "power_w", lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),  # mW to W
            GpuQuery("energy", "energy_j", lambda gpu: read_energy_mj(gpu) / 1000),
            GpuQuery("temperature", "temperature_c", lambda gpu: float(nvml.nvmlDeviceGetTemperature(gpu, gpu_sensor))),
            GpuQuery("SM clock", "sm_clock_mhz", lambda gpu: float(nvml.nvmlDeviceGetClockInfo(gpu, sm_clock))),
            GpuQuery("memory clock", "memory_clock_mhz", lambda gpu: float(nvml.nvmlDeviceGetClockInfo(gpu, memory_clock))),
            GpuQuery("throttling", "throttled", read_throttle_reasons),
        ]

    def _list_field_queries(self) -> list[FieldQuery]:
        nvml = self._nvml
        return [
            FieldQuery("corrected ECC errors", "ecc_corrected", nvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, 0, 1),
            FieldQuery("uncorrected ECC errors", "ecc_uncorrected", nvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, 0, 1),
            # Older GPUs have no such counters. They only support nvmlDeviceGetPcieThroughput, which is not used, because each
            # call measures for 20 ms and blocks the sampler meanwhile.
            FieldQuery("PCIe bytes sent", "pcie_tx_bytes", nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0, 1),
            FieldQuery("PCIe bytes received", "pcie_rx_bytes", nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0, 1),
            FieldQuery("NVLink bytes sent", "nvlink_tx_bytes", nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS, KIB),
            FieldQuery("NVLink bytes received", "nvlink_rx_bytes", nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS, KIB),
        ]

    def _register_events(self) -> None:
        """Make NVML collect the XIDs (error codes of the driver) of every GPU. Each sample then reads the new XIDs."""
        nvml = self._nvml
        try:
            self._event_set = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            self.unsupported["gpu XIDs"] += len(self._gpus)
            return
        for gpu in self._gpus:
            if gpu.mig_of is None:
                try:
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, self._event_set)
                except nvml.NVMLError:
                    self.unsupported["gpu XIDs"] += 1

    def _read_xids(self) -> dict[int | None, list[int]]:
        """Read the XIDs since the last sample. Returns {address in the NVML handle of a GPU: its XIDs}."""
        xids_by_address: dict[int | None, list[int]] = {}
        for _ in range(MOST_EVENTS):
            try:
                nvml_event = self._nvml.nvmlEventSetWait_v2(self._event_set, 0)
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_TIMEOUT:
                    self.failures["gpu XIDs"] += 1
                break
            if nvml_event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                address = ctypes.cast(nvml_event.device, ctypes.c_void_p).value
                xids_by_address.setdefault(address, []).append(int(nvml_event.eventData))
        return xids_by_address

    def _read_gpu(self, gpu: SampledGpu, xids_by_address: dict[int | None, list[int]]) -> GpuSample:
        gpu_sample = GpuSample(uuid=gpu.uuid, mig_of=gpu.mig_of, played=self._is_played)
        if self._is_first_sample:
            with contextlib.suppress(self._nvml.NVMLError):
                gpu_sample.memory_total_bytes = int(self._nvml.nvmlDeviceGetMemoryInfo(gpu.handle).total)
        if xids_by_address and gpu.mig_of is None:
            gpu_sample.xids = xids_by_address.get(gpu.address)
        for gpu_query in tuple(gpu.queries):
            if gpu.is_lost:
                break
            try:
                setattr(gpu_sample, gpu_query.sample_field, gpu_query.ask_gpu(gpu.handle))
            except self._nvml.NVMLError as error:
                if self._record_error(gpu, gpu_query.name, error.value):
                    gpu.queries.remove(gpu_query)
        if gpu.field_queries and not gpu.is_lost:
            self._read_fields(gpu, gpu_sample)
        gpu_sample.lost = gpu.is_lost
        return gpu_sample

    def _read_fields(self, gpu: SampledGpu, gpu_sample: GpuSample) -> None:
        field_ids = [(query.field_id, query.scope) for query in gpu.field_queries]
        try:
            field_values = self._nvml.nvmlDeviceGetFieldValues(gpu.handle, field_ids)
        except self._nvml.NVMLError as error:
            refused_queries = [query for query in gpu.field_queries if self._record_error(gpu, query.name, error.value)]
            gpu.field_queries = [query for query in gpu.field_queries if query not in refused_queries]
            return
        for query, field_value in zip(tuple(gpu.field_queries), field_values, strict=True):
            if field_value.nvmlReturn != self._nvml.NVML_SUCCESS:
                if self._record_error(gpu, query.name, field_value.nvmlReturn):
                    gpu.field_queries.remove(query)
            elif field_value.valueType == UNSIGNED_INT_TYPE and query.name.startswith("PCIe"):
                # A counter of 32 bits is useless: it overflows after 4 GiB, possibly several times between two samples.
                self.unsupported[f"gpu {query.name} (a counter of 32 bits)"] += 1
                gpu.field_queries.remove(query)
            else:
                answer = getattr(field_value.value, _VALUE_MEMBERS[field_value.valueType])
                setattr(gpu_sample, query.sample_field, int(answer) * query.unit_factor)

    def _record_error(self, gpu: SampledGpu, query_name: str, error_code: int) -> bool:
        """Record the error that NVML returned for a query of a GPU. Returns whether the GPU will never answer this query.

        A GPU that is lost is not queried again.
        """
        if error_code == self._nvml.NVML_ERROR_GPU_IS_LOST:
            if not gpu.is_lost:
                self.remarks.append(f"{gpu.uuid} was lost: {self._nvml.NVMLError(error_code)}")
            gpu.is_lost = True
        elif error_code in self._permanent_errors:
            self.unsupported[f"gpu {query_name}"] += 1
            return True
        else:
            self.failures[f"gpu {query_name}"] += 1
        return False
