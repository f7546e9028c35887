"""Generates traces as other versions and devices write them: old Kineto, RCCL, MTIA, and Inductor's Triton kernels.

Each trace is a list of events that json.dumps accepts, with times in us. Fields and names are the same as in real traces.
"""

from __future__ import annotations

import json
import random

RCCL = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
Event = dict[str, object]


def _complete(category: str, name: str, tid: object, at: float, lasts: float, **args: object) -> Event:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": at, "dur": lasts, "args": args}


def old_kineto(seed: int = 0, steps: int = 2, kernels: int = 4) -> list[Event]:
    """A trace of PyTorch 1.8 or 1.9: capitalized categories, whole microseconds, and `external id` in small letters."""
    pick, now, events, number = random.Random(seed), 1_621_401_187_223_000, [], 100
    for step in range(steps):
        begin = now
        for _ in range(kernels):
            number += 1
            events.append(_complete("Operator", "aten::mm", 5, now, 9, **{"External id": number, "Input dims": [[2, 3], []]}))
            for category, name in (("Kernel", "volta_sgemm_128x64_nn"), ("Memcpy", "Memcpy DtoD (Device -> Device)")):
                number += 1
                events.append(_complete("Runtime", "cudaLaunchKernel", 5, now + 1, 2, cbid=211, correlation=number))
                lasts = pick.randint(3, 30)
                args = {"device": 0, "stream": 7, "correlation": number, "external id": number}
                events.append(_complete(category, name, "stream 7", now + 4, lasts, **args))
                now += lasts + pick.randint(4, 9)
        events.append(_complete("Memset", "Memset (Device)", "stream 7", now, 2, stream=7, correlation=number))
        events.append(_complete("Operator", f"ProfilerStep#{step}", 5, begin, now - begin + 3))
        now += 5
    return events


def rccl(seed: int = 0, steps: int = 2, kernels: int = 4, before: int = 3) -> list[Event]:
    """A trace of ROCm: all collectives use the same kernel, and its arguments say which collective it is.

    before: the number of kernels that were queued before the recording started.
    """
    pick, now, events = random.Random(seed), 3_743_411_000.125, []
    for index in range(before):
        events.append(_complete("kernel", RCCL, 4, now + 20 * index, 15.5, device=2, stream=4, correlation=10 + index))
    number, free = 100, now + 20 * before
    for step in range(steps):
        begin = now
        for index in range(kernels):
            for name, stream, args in (("Cijk_Ailk_Bljk", 0, {}), (RCCL, 4, _arguments(index))):
                number += 1
                events.append(_complete("cuda_runtime", "hipLaunchKernel", 542, now, 2.25, correlation=number))
                at, lasts = max(now + 3, free if stream == 4 else 0), pick.randint(40, 90) / 8
                free = at + lasts if stream == 4 else free
                args = args | {"device": 2, "stream": stream, "correlation": number, "kind": "Dispatch Kernel"}
                events.append(_complete("kernel", name, stream, at, lasts, **args))
                now = at + lasts + 1.5
        events.append(_complete("user_annotation", f"ProfilerStep#{step}", 542, begin, now - begin))
    return events


def _arguments(index: int) -> dict[str, object]:
    return {
        "Collective name": ("allreduce", "broadcast", "_reduce_scatter_base")[index % 3],
        "In msg nelems": 2873320,
        "Out msg nelems": 2873320,
        "Group size": 8,
        "dtype": "BFloat16",
        "In split size": "[]",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
    }


def mtia(seed: int = 0, steps: int = 2, kernels: int = 4) -> list[Event]:
    """A trace of Meta's accelerator MTIA, which has its own categories.

    Some requests have a stream and no correlation, and some have neither.
    """
    pick, now, number, events = random.Random(seed), 3_605_054_888.691, 1017, []
    for step in range(steps):
        begin = now
        for _ in range(kernels):
            number += 1
            events.append(_complete("cpu_op", "aten::mm", 310, now, 7.5, **{"External id": number}))
            events.append(_complete("mtia_runtime", "runFunction - submit", 310, now + 1, 3.5, correlation=number))
            events.append(_complete("mtia_ccp_events", "permute_2d", 408, now + 6, 9.125, correlation=number, stream=102))
            events.append(
                _complete("mtia_ccp_events", "dma_request", 408, now + 2, pick.randint(20, 80) / 8, stream=102, size=16)
            )
            events.append(_complete("mtia_ccp_events", "dma_request", 801, now + 3, 1.25, direction="DEVICE_TO_HOST"))
            now += pick.randint(16, 30)
        events.append(_complete("user_annotation", f"ProfilerStep#{step}", 310, begin, now - begin - 0.5))
    return events


def triton(seed: int = 0, steps: int = 2, kernels: int = 4, stream: object = 7) -> list[Event]:
    """A trace of Inductor: an operator on the CPU has the stream of the kernel that it launches, and no correlation."""
    pick, now, number, events = random.Random(seed), 4_458_676_522.125, 200, []
    for step in range(steps):
        begin = now
        for index in range(kernels):
            name, number = f"triton_poi_fused_add_{index}", number + 1
            details = {"kernel_backend": "triton", "stream": stream, "grid": "grid(100,)", "kernel_hash": "c4dx"}
            events.append(_complete("cpu_op", name, 11, now, 12.75, **details))
            events.append(_complete("cuda_driver", "cuLaunchKernel", 11, now + 5, 4.5, correlation=number))
            args = {"device": 0, "stream": stream, "correlation": number, "est. achieved occupancy %": 0.5}
            events.append(_complete("kernel", name, 7, now + 14, pick.randint(20, 60) / 8, **args))
            now += pick.randint(22, 40)
        events.append(_complete("user_annotation", f"ProfilerStep#{step}", 11, begin, now - begin - 1))
    return events


def detailed(seed: int = 0, steps: int = 2, kernels: int = 4) -> list[Event]:
    """A trace of a GPU with stacks, shapes and memory: calls of modules, numbers of autograd, allocations, attention."""
    pick, now, number, sequence, held, events = random.Random(seed), 4_458_676_522.125, 300, 0, 4096, []
    for step in range(steps):
        begin, made = now, []
        for index in range(kernels):
            operator = ("aten::addmm", "aten::mm", "aten::_scaled_dot_product_flash_attention", "aten::bmm")[index % 4]
            shapes = ([[4], [8, 2], [2, 4]], [[8, 2], [2, 4]], [[1, 2, 3, 4]], [[5, 8, 2], [5, 2, 4]])[index % 4]
            for name in ("nn.Module: Model_0", f"nn.Module: Block_{index}"):
                events.append(_complete("python_function", name, 11, now, 20.5, **{"Python module id": index}))
            args = {"Input Dims": shapes, "Sequence number": sequence, "Fwd thread id": 0}
            events.append(_complete("cpu_op", operator, 11, now + 1, 12.75, **args))
            number, sequence, held = number + 1, sequence + 1, held + 512
            _kernel(events, number, 11, now + 5, pick.randint(20, 60) / 8)
            made.append((sequence - 1, operator))
            memory = {"Total Allocated": held, "Total Reserved": 2 * held, "Bytes": 512, "Device Id": 0, "Device Type": 1}
            events.append(
                {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 11, "ts": now, "args": memory}
            )
            now += pick.randint(22, 40)
        for of, operator in reversed(made):
            args, number = {"Sequence number": of, "Fwd thread id": 1}, number + 1
            events.append(_complete("cpu_op", f"autograd::engine::evaluate_function: {operator}", 12, now, 9.5, **args))
            _kernel(events, number, 12, now + 2, pick.randint(20, 60) / 8)
            now += pick.randint(12, 30)
        events.append(_complete("user_annotation", f"ProfilerStep#{step}", 11, begin, now - begin - 1))
    return events


def _kernel(events: list[Event], number: int, thread: int, launched: float, lasts: float) -> None:
    events.append(_complete("cuda_runtime", "cudaLaunchKernel", thread, launched, 2.5, correlation=number))
    args = {"device": 0, "stream": 7, "correlation": number}
    events.append(_complete("kernel", "flash::flash_fwd_kernel", 7, launched + 6, lasts, **args))


SHAPES = {"old Kineto": old_kineto, "RCCL": rccl, "MTIA": mtia, "Triton": triton, "details": detailed}


def text(events: list[Event], rank: int | None = 0) -> bytes:
    """The bytes of a whole trace. rank: None for a trace that does not record its rank."""
    about = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "pg_config": [{"ranks": [0]}, {}]}}
    return json.dumps({"schemaVersion": 1, **about, "traceEvents": events, "traceName": "t.json"}, indent=1).encode()
