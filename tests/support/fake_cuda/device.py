"""Replaces the functions with which torch.cuda calls the driver and the allocator: number of GPUs, current GPU, memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fake_cuda import waits

COUNTED = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
    "inactive_split_bytes", "requested_bytes",
)  # fmt: skip


def install(devices: int, memory_bytes: int, name: str) -> None:
    below, ours, cuda = torch._C, torch.ops.fake_cuda, torch.cuda

    def properties(index: int) -> Any:
        return SimpleNamespace(
            name=name, uuid=f"00000000-0000-0000-0000-{index:012d}", major=9, minor=0, total_memory=memory_bytes,
            multi_processor_count=132, warp_size=32, gcnArchName="", is_integrated=False, L2_cache_size=50 * 2**20,
            max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
            shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
            pci_bus_id=index, pci_device_id=0, pci_domain_id=0,
        )  # fmt: skip

    def exchange(index: int) -> int:
        before = int(ours.current_device())
        if index >= 0:
            ours.set_device(index)
        return before

    def index_of(device: Any = None) -> int:
        return int(cuda._utils._get_device_index(device, optional=True))

    def free_and_total(device: Any = None) -> tuple[int, int]:
        return memory_bytes - int(ours.in_use(index_of(device))), memory_bytes

    def limit_share(share: float, index: int) -> None:
        ours.limit(index, int(share * memory_bytes))

    recorded: list[dict[str, Any]] = []  # the history of the allocator: an event for each call that started to record

    def record_history(enabled: Any = None, context: Any = None, stacks: str = "all", *_: Any, **__: Any) -> None:
        if enabled is not None:
            recorded.append(_event([{"filename": "a.py", "line": 1, "name": "f"}] if stacks in ("python", "all") else []))

    for index in range(devices):
        ours.limit(index, memory_bytes)
    replaced: dict[str, Any] = {
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": False,
        "_cuda_getDeviceCount": lambda: devices,
        "_cuda_getDevice": lambda: int(ours.current_device()),
        "_cuda_setDevice": ours.set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_synchronize": lambda *_: waits.note("synchronize a GPU"),
        "_cuda_getArchFlags": lambda: "sm_80 sm_90",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_emptyCache": lambda *_: None,
        "_cuda_memoryStats": lambda index: _statistics(int(ours.in_use(index)), int(ours.peak(index))),
        "_cuda_resetPeakMemoryStats": ours.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda index: None,
        "_cuda_setMemoryFraction": limit_share,
        "_cuda_memorySnapshot": lambda *_: _snapshot(recorded),
        "_cuda_record_memory_history": record_history,
        "_cuda_record_memory_history_legacy": lambda *_, **__: None,
        "_cuda_canDeviceAccessPeer": lambda *_: True,
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_getCurrentRawStream": lambda index: 0,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_ipc_collect": lambda: None,
        "_get_device_properties": properties,
        "_nccl_version": lambda: (2 << 32) | (28 << 16) | 9,
        "_nccl_version_suffix": lambda: b"",
    }
    for name_of, function in replaced.items():
        setattr(below, name_of, function)
    for of_cuda, function in {
        "_get_device_properties": properties,
        "_cudart": SimpleNamespace(cudaGetErrorString=lambda code: "a fake error"),
        "_is_compiled": lambda: True,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "_device_count_nvml": lambda: devices,
        "device_count": lambda: devices,
        "is_available": lambda: devices > 0,
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": free_and_total,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),  # fake GPUs use the random numbers of the host
        "set_rng_state": lambda new_state, device="cuda": None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }.items():
        setattr(cuda, of_cuda, function)
    cuda.memory.mem_get_info = free_and_total
    for name_of in ("get_rng_state", "set_rng_state", "manual_seed_all"):
        setattr(cuda.random, name_of, getattr(cuda, name_of))
    for name_of in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(cuda.nvtx, name_of, lambda *_, **__: 0)
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "13.0"
    _resize_storages()


def _statistics(in_use: int, peak: int) -> dict[str, Any]:
    """The counters of the allocator, in bytes. A real allocator reserves more memory than is in use; here both are equal."""
    one = {"current": in_use, "peak": peak, "allocated": in_use, "freed": 0}
    pools = {name: {"all": one, "small_pool": one, "large_pool": one} for name in COUNTED}
    zeros = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
    return {
        **pools, **dict.fromkeys(zeros, 0), "max_split_size": -1, "oversize_allocations": one, "oversize_segments": one,
    }  # fmt: skip


def _event(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """An allocation in the history of the allocator, in the format of torch 2.13."""
    return {
        "action": "alloc", "addr": 1, "size": 512, "stream": 0, "time_us": 1, "compile_context": "N/A", "user_metadata": "",
        "frames": frames,
    }  # fmt: skip


def _snapshot(recorded: list[dict[str, Any]]) -> dict[str, Any]:
    """A snapshot of the allocator with one segment, one block and these events, in the format of torch 2.13."""
    block = {"address": 1, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": []}
    segment = {
        "device": 0, "address": 1, "total_size": 2**21, "allocated_size": 512, "active_size": 512, "requested_size": 500,
        "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
        "blocks": [block],
    }  # fmt: skip
    return {"segments": [segment], "device_traces": [recorded], "allocator_settings": {}, "external_annotations": []}


def _resize_storages() -> None:
    """Replace `UntypedStorage.resize_`, with which FSDP frees the parameters that it gathered."""
    on_host = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return on_host(self, size)
        tensor = torch.empty(0, dtype=torch.uint8, device=self.device)
        tensor.set_(self, 0, (0,), (1,))
        torch.ops.fake_cuda.resize_storage(tensor, size)
        return self

    torch.UntypedStorage.resize_ = resize
