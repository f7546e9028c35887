"""The GPUs of a machine and the links between them, as NVML reports them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from shardlab.record_types import Count, Integer, Measured

T = TypeVar("T")
# The words of `nvidia-smi topo` for the connection between two GPUs, by NVML's number for their nearest common ancestor in the
# PCI tree.
NAME_BY_ANCESTOR_LEVEL = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# The reasons why a GPU lowers its clocks, by NVML's bits (nvmlClocksEventReasons). The bits that are left out mean that a user
# set the clocks, or that the GPU is idle.
POWER_CAP = "power cap"
THROTTLE_REASON_BY_BIT = {
    0x04: POWER_CAP,
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class Gpu(msgspec.Struct, omit_defaults=True):
    """The constant properties of a GPU, from NVML. Properties that change over time are in the telemetry (record.GpuSample).

    A property is None if NVML does not report it. Names end with the unit: bytes, W (power), MHz (clocks).
    """

    uuid: str
    name: str
    """Product name."""
    memory_bytes: Count | None = None
    """Its memory."""
    power_limit_w: Measured | None = None
    """Present limit of power."""
    pci: str | None = None
    power_limit_max_w: Measured | None = None
    """Highest limit that can be set."""
    sm_clock_max_mhz: Count | None = None
    """Highest clock of the multiprocessors."""
    memory_clock_max_mhz: Count | None = None
    """Highest clock of the memory."""
    numa_node: Integer | None = None
    """Number of the NUMA node to which it is attached."""
    persistence: bool | None = None
    """Whether the driver stays loaded without a client."""
    pcie_generation_max: Count | None = None
    """Highest PCIe generation of the GPU."""
    pcie_width: Count | None = None
    """The number of PCIe lanes in use. If it is smaller than pcie_width_max, the card may not be plugged in properly."""
    pcie_width_max: Count | None = None
    """Highest number of PCIe lanes of the GPU."""
    nvlinks: dict[str, int] | None = None
    """The number of active NVLinks, by the PCI address of the other end, which is a GPU or a switch."""
    paths: dict[str, str] | None = None
    """The connection to each other GPU, by the UUID of the other GPU: PIX (through one PCI bridge), PXB (several bridges), PHB
    (host bridge), NODE (within a NUMA node), SYS (between NUMA nodes)."""


def read_gpus() -> tuple[str | None, list[Gpu] | None, str | None]:
    """Ask NVML for the GPUs of this machine. Returns (version of the driver, GPUs, None).

    If NVML is not installed or fails, returns (None, None, the reason in words).
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, None, f"NVML: {error}"
    try:
        gpu_handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in gpu_handles]
        observed_gpus = [_read_gpu(handle, uuid) for handle, uuid in zip(gpu_handles, uuids)]
        for gpu, handle in zip(observed_gpus, gpu_handles):
            other_gpus = [(uuid, other) for uuid, other in zip(uuids, gpu_handles) if uuid != gpu.uuid]
            path_by_uuid = {
                uuid: path for uuid, other in other_gpus if (path := _call_if_supported(_read_link, handle, other)) is not None
            }
            gpu.paths = path_by_uuid or None
        return pynvml.nvmlSystemGetDriverVersion(), observed_gpus, None
    except pynvml.NVMLError as error:
        return None, None, f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()


class GpuProcess(NamedTuple):
    """A process that computes on a GPU."""

    pid: int
    name: str
    """Empty if the process is not visible here, because it is in another container."""


def read_gpu_processes() -> dict[str, list[GpuProcess]] | None:
    """The processes that compute on each GPU, by the UUID of the GPU, in NVML's order; None if NVML does not work here."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        gpu_handles = [_call_if_supported(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(nvml.nvmlDeviceGetCount())]
        processes_by_gpu = {}
        for handle in filter(None, gpu_handles):  # a GPU that a container hides has no handle
            process_entries = _call_if_supported(read_compute_processes, handle) or []
            processes_by_gpu[nvml.nvmlDeviceGetUUID(handle)] = [
                GpuProcess(process_entry.pid, _read_process_name(process_entry.pid)) for process_entry in process_entries
            ]
        return processes_by_gpu
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def read_compute_processes(gpu_handle: Any) -> list[Any]:
    """NVML's entries for the processes that compute on this GPU. gpu_handle: NVML's handle of the GPU. Raises NVMLError."""
    import pynvml as nvml

    try:
        entries: list[Any] = nvml.nvmlDeviceGetComputeRunningProcesses(gpu_handle)
    # pynvml calls version 3 of this function, and drivers before 510 have only version 2. This error is no NVMLError.
    except nvml.NVMLLibraryMismatchError:
        entries = nvml.nvmlDeviceGetComputeRunningProcesses_v2(gpu_handle)
    return entries


def read_throttle_reasons(gpu_handle: Any) -> list[str]:
    """The reasons why the clocks of this GPU are lowered now, as values of THROTTLE_REASON_BY_BIT. Raises NVMLError."""
    import pynvml as nvml

    try:
        reason_bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu_handle)
    except nvml.NVMLError_FunctionNotFound:  # drivers before 535 have only the old name of this function
        reason_bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu_handle)
    return convert_throttle_bits(reason_bits)


def convert_throttle_bits(reason_bits: int) -> list[str]:
    """The reasons, as values of THROTTLE_REASON_BY_BIT, for which these bits of NVML stand."""
    return [reason for reason_bit, reason in THROTTLE_REASON_BY_BIT.items() if reason_bits & reason_bit]


def _read_process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _read_gpu(gpu_handle: Any, uuid: str) -> Gpu:
    import pynvml as nvml

    gpu = Gpu(uuid=uuid, name=nvml.nvmlDeviceGetName(gpu_handle))
    gpu.memory_bytes = _call_if_supported(lambda: int(nvml.nvmlDeviceGetMemoryInfo(gpu_handle).total))
    gpu.pci = _call_if_supported(lambda: str(nvml.nvmlDeviceGetPciInfo(gpu_handle).busId))
    # NVML gives milliwatts
    gpu.power_limit_w = _call_if_supported(lambda: nvml.nvmlDeviceGetPowerManagementLimit(gpu_handle) / 1000)
    gpu.power_limit_max_w = _call_if_supported(lambda: nvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu_handle)[1] / 1000)
    gpu.sm_clock_max_mhz = _call_if_supported(nvml.nvmlDeviceGetMaxClockInfo, gpu_handle, nvml.NVML_CLOCK_SM)
    gpu.memory_clock_max_mhz = _call_if_supported(nvml.nvmlDeviceGetMaxClockInfo, gpu_handle, nvml.NVML_CLOCK_MEM)
    gpu.numa_node = _call_if_supported(nvml.nvmlDeviceGetNumaNodeId, gpu_handle)
    gpu.persistence = _call_if_supported(lambda: bool(nvml.nvmlDeviceGetPersistenceMode(gpu_handle)))
    gpu.pcie_generation_max = _call_if_supported(nvml.nvmlDeviceGetMaxPcieLinkGeneration, gpu_handle)
    gpu.pcie_width = _call_if_supported(nvml.nvmlDeviceGetCurrPcieLinkWidth, gpu_handle)
    gpu.pcie_width_max = _call_if_supported(nvml.nvmlDeviceGetMaxPcieLinkWidth, gpu_handle)
    gpu.nvlinks = _count_nvlinks(gpu_handle)
    return gpu


def _count_nvlinks(gpu_handle: Any) -> dict[str, int] | None:
    """The number of a GPU's active NVLinks, by the PCI address of their other end; None if NVML reports no active NVLink."""
    import pynvml as nvml

    count_by_address: dict[str, int] = {}
    for link_index in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _call_if_supported(nvml.nvmlDeviceGetNvLinkState, gpu_handle, link_index):
            remote_pci = _call_if_supported(nvml.nvmlDeviceGetNvLinkRemotePciInfo, gpu_handle, link_index)
            remote_address = str(remote_pci.busId) if remote_pci is not None else "unknown"
            count_by_address[remote_address] = count_by_address.get(remote_address, 0) + 1
    return count_by_address or None


def _read_link(gpu_handle: Any, other_handle: Any) -> str | None:
    import pynvml as nvml

    return NAME_BY_ANCESTOR_LEVEL.get(nvml.nvmlDeviceGetTopologyCommonAncestor(gpu_handle, other_handle))


def _call_if_supported(nvml_function: Callable[..., T], *arguments: Any) -> T | None:
    """Call a function of NVML and return its result; None if NVML raises an error, for example if the GPU does not support it.

    nvml_function: the function. arguments: its arguments.
    """
    import pynvml

    try:
        return nvml_function(*arguments)
    except pynvml.NVMLError:
        return None
