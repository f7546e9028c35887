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

from collect.sampler.source import Source
from shardlab.errors import InputError
from shardlab.hardware.nvml import read_compute_processes, read_throttle_reasons
from shardlab.runs.record import GpuSample, Sample

KIB = 1024
MOST_EVENTS = 64  # the most events that one sample reads: a faulty GPU may report errors faster than they can be read
ALL_LINKS = 0xFFFFFFFF  # the scope with which NVML returns the sum over all NVLinks of a GPU
UNSIGNED_INT = 1
# The members of NVML's union for values (nvmlValue_t). The number `valueType` of a value is the index of its member here.
_VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class GpuQuestion(NamedTuple):
    """A query for which NVML has its own function, such as nvmlDeviceGetPowerUsage."""

    name: str
    """The key of this query in `failures` and `unsupported`."""
    field: str
    """The field of GpuSample that gets the answer."""
    ask: Callable[[Any], Any]
    """Calls the function of NVML with the NVML handle of a GPU."""


class FieldQuestion(NamedTuple):
    """A query by the number of an NVML field; one call of nvmlDeviceGetFieldValues answers many such queries."""

    name: str
    """The key of this query in `failures` and `unsupported`."""
    field: str
    """The field of GpuSample that gets the answer."""
    number: int
    """The number of the NVML field."""
    scope: int
    """The scope of the NVML field."""
    unit: int
    """The factor by which the answer is multiplied, such as KIB."""


class OpenGpu(msgspec.Struct):
    """A GPU or a MIG instance that is sampled."""

    uuid: str
    """Its UUID."""
    handle: Any
    """Its NVML handle."""
    questions: list[GpuQuestion]
    """The queries that NVML has not refused for this GPU so far."""
    fields: list[FieldQuestion]
    """The fields that NVML has not refused for this GPU so far."""
    mig_of: str | None = None
    """The UUID of the GPU to which a MIG instance belongs; None for a GPU."""
    lost: bool = False
    """Whether NVML reported the GPU as lost."""

    @property
    def address(self) -> int | None:
        """The address in the NVML handle. An event of NVML contains this address to say which GPU the event is about."""
        return ctypes.cast(self.handle, ctypes.c_void_p).value


class GpuSource(Source):
    """Adds a `GpuSample` for every GPU and MIG instance to each sample.

    why_absent: why NVML cannot be used; None if NVML can be used.
    """

    def __init__(self, played_file: Path | None = None) -> None:
        """Open NVML and all GPUs. Raises InputError if a stub of NVML cannot be loaded.

        played_file: a stub of NVML that is loaded in place of the driver's library. The stub makes up GPUs and their values, so
        all samples are marked as played. None: the library of the driver is used.
        """
        super().__init__()
        import pynvml

        self._nvml, self._played, self._is_first_sample = pynvml, played_file is not None, True
        if played_file is not None:
            try:
                pynvml.nvmlLib = ctypes.CDLL(str(played_file.absolute()))
            except OSError as error:
                raise InputError(f"--played: {error}. Allowed: a shared library with NVML's functions.") from None
        self._permanent_errors = {
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            pynvml.NVML_ERROR_NO_PERMISSION,
            pynvml.NVML_ERROR_INVALID_ARGUMENT,
        }
        self._gpus: list[OpenGpu] = []
        self._events: Any = None
        self.why_absent: str | None = None
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self.why_absent = f"NVML: {error}"
            return
        for index in range(count):
            try:
                self._open_gpu(pynvml.nvmlDeviceGetHandleByIndex(index))
            except pynvml.NVMLError as error:  # this GPU is not sampled, but the other GPUs are
                self.remarks.append(f"GPU {index} cannot be sampled: {error}")
        self._register_events()

    def fill(self, sample: Sample) -> None:
        """Set the field `gpus` of the sample: one entry per GPU and MIG instance of this machine."""
        if self._gpus:
            xids = self._read_xids() if self._events is not None else {}
            sample.gpus = [self._read(gpu, xids) for gpu in self._gpus]
            self._is_first_sample = False

    def _open_gpu(self, handle: Any) -> None:
        """Start to sample a GPU and its MIG instances. Raises NVMLError if NVML does not return the UUID of the GPU."""
        nvml = self._nvml
        uuid = nvml.nvmlDeviceGetUUID(handle)
        self._gpus.append(OpenGpu(uuid, handle, [*self._instance_questions(), *self._gpu_questions()], self._field_questions()))
        try:
            if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
                return
            most_instances = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except nvml.NVMLError:
            return
        for index in range(most_instances):
            try:
                mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                self._gpus.append(OpenGpu(nvml.nvmlDeviceGetUUID(mig), mig, self._instance_questions(), [], mig_of=uuid))
            except nvml.NVMLError:  # there is no instance with this index
                continue

    def _instance_questions(self) -> list[GpuQuestion]:
        """The queries that both GPUs and MIG instances support. NVML reports power, clocks and utilization only for a whole
        GPU."""
        nvml = self._nvml
        return [
            GpuQuestion("memory", "memory_used_bytes", lambda handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
            GpuQuestion("processes", "processes", lambda handle: len(read_compute_processes(handle))),
        ]

    def _gpu_questions(self) -> list[GpuQuestion]:
        nvml = self._nvml
        sm, memory, core = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM, nvml.NVML_TEMPERATURE_GPU
        energy_mj = nvml.nvmlDeviceGetTotalEnergyConsumption
        return [
            GpuQuestion("utilization", "utilization_pct", lambda gpu: float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)),
            GpuQuestion("power", "power_w", lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),  # mW to W
            GpuQuestion("energy", "energy_j", lambda gpu: energy_mj(gpu) / 1000),
            GpuQuestion("temperature", "temperature_c", lambda gpu: float(nvml.nvmlDeviceGetTemperature(gpu, core))),
            GpuQuestion("SM clock", "sm_clock_mhz", lambda gpu: float(nvml.nvmlDeviceGetClockInfo(gpu, sm))),
            GpuQuestion("memory clock", "memory_clock_mhz", lambda gpu: float(nvml.nvmlDeviceGetClockInfo(gpu, memory))),
            GpuQuestion("throttling", "throttled", read_throttle_reasons),
        ]

    def _field_questions(self) -> list[FieldQuestion]:
        nvml = self._nvml
        return [
            FieldQuestion("corrected ECC errors", "ecc_corrected", nvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, 0, 1),
            FieldQuestion("uncorrected ECC errors", "ecc_uncorrected", nvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, 0, 1),
            # Older GPUs have no such counters. They only support nvmlDeviceGetPcieThroughput, which is not used, because each
            # call measures for 20 ms and blocks the sampler meanwhile.
            FieldQuestion("PCIe bytes sent", "pcie_tx_bytes", nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0, 1),
            FieldQuestion("PCIe bytes received", "pcie_rx_bytes", nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0, 1),
            FieldQuestion("NVLink bytes sent", "nvlink_tx_bytes", nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS, KIB),
            FieldQuestion(
                "NVLink bytes received", "nvlink_rx_bytes", nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS, KIB
            ),
        ]

    def _register_events(self) -> None:
        """Make NVML collect the XIDs (error codes of the driver) of every GPU. Each sample then reads the new XIDs."""
        nvml = self._nvml
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            self.unsupported["gpu XIDs"] += len(self._gpus)
            return
        for gpu in self._gpus:
            if gpu.mig_of is None:
                try:
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, self._events)
                except nvml.NVMLError:
                    self.unsupported["gpu XIDs"] += 1

    def _read_xids(self) -> dict[int | None, list[int]]:
        """Read the XIDs (error codes of the driver) since the last sample. Returns {address in the NVML handle of a GPU: its
        XIDs}."""
        xids_of_gpu: dict[int | None, list[int]] = {}
        for _ in range(MOST_EVENTS):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_TIMEOUT:
                    self.failures["gpu XIDs"] += 1
                break
            if event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                address = ctypes.cast(event.device, ctypes.c_void_p).value
                xids_of_gpu.setdefault(address, []).append(int(event.eventData))
        return xids_of_gpu

    def _read(self, gpu: OpenGpu, xids: dict[int | None, list[int]]) -> GpuSample:
        gpu_sample = GpuSample(uuid=gpu.uuid, mig_of=gpu.mig_of, played=self._played)
        if self._is_first_sample:
            with contextlib.suppress(self._nvml.NVMLError):
                gpu_sample.memory_total_bytes = int(self._nvml.nvmlDeviceGetMemoryInfo(gpu.handle).total)
        if xids and gpu.mig_of is None:
            gpu_sample.xids = xids.get(gpu.address)
        for question in tuple(gpu.questions):
            if gpu.lost:
                break
            try:
                setattr(gpu_sample, question.field, question.ask(gpu.handle))
            except self._nvml.NVMLError as error:
                if self._record_error(gpu, question.name, error.value):
                    gpu.questions.remove(question)
        if gpu.fields and not gpu.lost:
            self._read_fields(gpu, gpu_sample)
        gpu_sample.lost = gpu.lost
        return gpu_sample

    def _read_fields(self, gpu: OpenGpu, gpu_sample: GpuSample) -> None:
        field_ids = [(question.number, question.scope) for question in gpu.fields]
        try:
            values = self._nvml.nvmlDeviceGetFieldValues(gpu.handle, field_ids)
        except self._nvml.NVMLError as error:
            refused_fields = [question for question in gpu.fields if self._record_error(gpu, question.name, error.value)]
            gpu.fields = [question for question in gpu.fields if question not in refused_fields]
            return
        for question, value in zip(tuple(gpu.fields), values, strict=True):
            if value.nvmlReturn != self._nvml.NVML_SUCCESS:
                if self._record_error(gpu, question.name, value.nvmlReturn):
                    gpu.fields.remove(question)
            elif value.valueType == UNSIGNED_INT and question.name.startswith("PCIe"):
                # A counter of 32 bits is useless: it overflows after 4 GiB, possibly several times between two samples.
                self.unsupported[f"gpu {question.name} (a counter of 32 bits)"] += 1
                gpu.fields.remove(question)
            else:
                number = getattr(value.value, _VALUE_TYPES[value.valueType])
                setattr(gpu_sample, question.field, int(number) * question.unit)

    def _record_error(self, gpu: OpenGpu, name: str, error: int) -> bool:
        """Record the error that NVML returned for a query of a GPU. Returns whether the GPU will never answer this query.

        A GPU that is lost is not queried again.
        """
        if error == self._nvml.NVML_ERROR_GPU_IS_LOST:
            if not gpu.lost:
                self.remarks.append(f"{gpu.uuid} was lost: {self._nvml.NVMLError(error)}")
            gpu.lost = True
        elif error in self._permanent_errors:
            self.unsupported[f"gpu {name}"] += 1
            return True
        else:
            self.failures[f"gpu {name}"] += 1
        return False
