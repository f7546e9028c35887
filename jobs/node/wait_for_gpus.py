"""Waits until no other process uses the GPUs of a run, because their computations would change the measured times."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from socket import gethostname

from jobs.launcher import find_launcher
from jobs.node import node_processes
from jobs.node.rendezvous import read_node_number
from shardlab.errors import ShardlabError
from shardlab.hardware import nvml
from shardlab.hardware.nvml import GpuProcess
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir

VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
GPU_POLL_S = 2.0
WAITING_EVENT_S = 60.0
# The server process of NVIDIA MPS. It holds a CUDA context for the processes that share a GPU, but computes nothing itself.
MPS_SERVER = "nvidia-cuda-mps-server"
LEAST_WAIT_S = 5.0  # seconds for which the driver may still list a process after its end, such as a rank of the previous run


def wait_until_gpus_free(run_dir: RunDir, run: Run, environment: Mapping[str, str], is_told_to_end: Callable[[], bool]) -> None:
    """Wait until the GPUs of the run on this node are free, or until the run is told to end.

    environment: the environment of the ranks. is_told_to_end: whether the run is told to end. Raises ShardlabError, which names
    the GPUs and the processes, if the GPUs are still in use after the time that `jobs submit --wait-gpus` allows.
    """
    if not find_launcher(run.launcher).on_gpus:  # the processes of the run compute on the CPU
        return
    deadline_s, next_event_s = time.monotonic() + max(run.wait_gpus_s, LEAST_WAIT_S), 0.0
    gpu_count = _count_gpus(run, read_node_number(environment))
    while processes_by_gpu := find_processes_on_gpus(
        _find_other_processes(run_dir), environment.get(VISIBLE_DEVICES_VARIABLE), gpu_count
    ):
        usage_clause = _describe_usage(processes_by_gpu)
        if time.monotonic() > deadline_s:
            raise ShardlabError(
                f"{gethostname()}: {usage_clause}. The run was not started, because times on shared GPUs are wrong. "
                "End these processes, or let the run wait until they end: `jobs submit --wait-gpus SECONDS`."
            )
        if run.wait_gpus_s and time.monotonic() >= next_event_s:
            # The event is written again and again, because the supervisor ends a run that writes nothing during its hang limit.
            run_dir.write_event(f"gpus-{gethostname()}", "waiting", why=usage_clause)
            next_event_s = time.monotonic() + min(WAITING_EVENT_S, run.cell.hang_limit_s / 4)
        if is_told_to_end():
            return
        time.sleep(GPU_POLL_S)


def _count_gpus(run: Run, node_number: int) -> int:
    """The number of GPUs that the ranks on node number `node_number` use. The last ranks of a run may be parameter servers,
    which use no GPU."""
    ranks_per_node = run.world.nproc_per_node
    return min(max(run.cell.gpus - node_number * ranks_per_node, 0), ranks_per_node)


def _find_other_processes(run_dir: RunDir) -> dict[str, list[GpuProcess]]:
    """The processes on each GPU of this node that do not belong to this run, by the UUID of the GPU."""
    processes_by_gpu = nvml.read_gpu_processes() or {}
    return {
        uuid: [
            process
            for process in processes
            if process.name != MPS_SERVER and not node_processes.belongs_to_run(process.pid, run_dir)
        ]
        for uuid, processes in processes_by_gpu.items()
    }


def find_processes_on_gpus(
    processes_by_gpu: Mapping[str, list[GpuProcess]], visible_devices: str | None, gpu_count: int
) -> dict[str, list[GpuProcess]]:
    """The processes on each GPU that the ranks of a node will use, by UUID. GPUs without processes are left out.

    processes_by_gpu: the processes on all GPUs of the node, in PCI order. visible_devices: the value of CUDA_VISIBLE_DEVICES
    (indices, or UUIDs, which may be abbreviated), or None if it is not set. gpu_count: the number of ranks on this node; each
    rank uses one GPU."""
    gpu_uuids = list(processes_by_gpu)
    if visible_devices is not None:
        visible_uuids = (_find_uuid(device_name.strip(), gpu_uuids) for device_name in visible_devices.split(","))
        gpu_uuids = list(itertools.takewhile(bool, visible_uuids))  # like CUDA, ignore all entries after an invalid entry
    return {uuid: processes_by_gpu[uuid] for uuid in gpu_uuids[:gpu_count] if processes_by_gpu[uuid]}


def _find_uuid(gpu_name: str, gpu_uuids: list[str]) -> str:
    """The UUID of the GPU that a word of CUDA_VISIBLE_DEVICES names; '' if the word names no GPU, or only a part of a GPU."""
    if gpu_name.isdecimal():
        return gpu_uuids[int(gpu_name)] if int(gpu_name) < len(gpu_uuids) else ""
    return next((uuid for uuid in gpu_uuids if gpu_name and uuid.startswith(gpu_name)), "")


def _describe_usage(processes_by_gpu: Mapping[str, list[GpuProcess]]) -> str:
    def format_process(other_process: GpuProcess) -> str:
        return f"{other_process.pid} ({other_process.name})" if other_process.name else str(other_process.pid)

    return "; ".join(
        f"GPU {uuid} is used by process {', '.join(map(format_process, processes))}"
        for uuid, processes in processes_by_gpu.items()
    )
