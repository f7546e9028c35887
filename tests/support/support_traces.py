"""Generates traces as Kineto writes them for a GPU, and computes their true figures by a sweep over all begins and ends."""

import gzip
import json
import random
from collections import Counter
from fractions import Fraction

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas"
ELEMENTWISE = 'void at::native::elementwise_kernel<4, "quoted \\\\ { } [ ] , \\u00e9">(int, std::array<char*, 3ul>)'
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
COPY = "Memcpy HtoD (Pinned -> Device)"
MEMORY = {"gpu_memcpy", "gpu_memset"}
# Two start times of a trace in ns. New versions of Kineto count from a base of their own; old versions count from the epoch.
NEW, OLD = 4_458_676_522_000_000, 1_712_195_495_507_000_137


class Rank:
    """Generates the trace events of one rank, as dictionaries. Their times are whole nanoseconds."""

    def __init__(self, rank: int, *, seed: int = 0, steps: int = 4, kernels: int = 12, start: int = NEW) -> None:
        self.rank = rank
        self.events: list[dict] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": start, "args": {"name": "python"}}
        ]
        self._random = random.Random(seed * 1000 + rank)
        self._free = dict.fromkeys((7, 20, 24), start)
        self._correlation = 1000  # above 127, because HTA 0.5 with pandas 3 fails if all correlation ids are smaller
        now = start
        for step in range(steps):
            now = self._step(step, now, kernels)

    def _step(self, step: int, begin: int, kernels: int) -> int:
        pick, now = self._random, begin
        self._launch("gpu_memcpy", COPY, 24, now, 3000)
        for index in range(kernels):
            self._add("cpu_op", "aten::mm" if index % 2 else "aten::add", now, 9000, args={"Input Dims": [[2, 3], []]})
            self._launch("kernel", GEMM if index % 2 else ELEMENTWISE, 7, now + 700, pick.choice((480, 900, 5000, 20_000)))
            if index % 4 == 3:
                earliest = self._free[7] - pick.randint(0, 9000)
                self._launch("kernel", pick.choice((ALL_REDUCE, ALL_GATHER)), 20, now + 900, 25_000, earliest)
            if index % 5 == 4:
                self._launch("gpu_memset", "Memset (Device)", 7, now + 800, 300)
            now += pick.randint(3000, 16_000)
        self._add("cuda_sync", "Stream Wait Event", now, 100, tid=20, args={"stream": 20, "correlation": self._correlation})
        self._add("cuda_sync", "Event Sync", now, 5000, tid=-1, args={"stream": -1, "correlation": self._correlation})
        self._add("gpu_user_annotation", f"ProfilerStep#{step}", self._free[7] - 5000, 4000, tid=7)
        now = max(now, *self._free.values()) + pick.randint(0, 9000)
        self._add("user_annotation", f"ProfilerStep#{step}", begin, now - begin - 100)
        return now

    def _launch(self, category: str, name: str, stream: int, at: int, duration: int, earliest: int = 0) -> None:
        self._correlation += 1
        link = {"correlation": self._correlation}
        self._add("cuda_runtime", "cudaLaunchKernel", at, 2500, args=link)
        begin = max(at + self._random.randint(2000, 5000), self._free[stream] + self._random.randint(0, 900), earliest)
        duration += self._random.randint(0, duration // 3)
        self._free[stream] = begin + duration
        self._add(
            category, name, begin, duration, tid=stream, args=link | {"device": 0, "stream": stream, "est. occupancy %": 0.5}
        )
        self.events.append({"ph": "s", "cat": "ac2g", "name": "ac2g", "id": self._correlation, "pid": 1, "tid": 1, "ts": at})

    def _add(self, category: str, name: str, at: int, duration: int, tid: int = 1, args: dict | None = None) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": at, "dur": duration, "args": args or {}}
        self.events.append(event)

    def text(self, *, pretty: bool = True) -> bytes:
        return text(self.events, self.rank, pretty=pretty)

    def write(self, folder, *, pretty: bool = True, gz: bool = False):
        path = folder / f"rank-{self.rank:05d}.json{'.gz' if gz else ''}"
        written = self.text(pretty=pretty)
        path.write_bytes(gzip.compress(written, 1) if gz else written)
        return path


def text(events: list[dict], rank: int = 0, *, pretty: bool = True) -> bytes:
    """The bytes of a whole trace.

    pretty: True for Kineto's layout, False for a layout without spaces.
    """
    if pretty:
        body = ",\n".join("  {\n    " + ",\n    ".join(_fields(event, ": ", ", ")) + "\n  }" for event in events)
        return (
            b'{\n  "schemaVersion": 1,\n  "distributedInfo": {"backend": "nccl", "pg_config": [{"ranks": [0]}], "rank": %d},\n'
            % rank
            + (f'  "displayTimeUnit": "ms",\n  "traceEvents": [\n{body}\n  ],\n  "traceName": "t.json"\n}}\n'.encode())
        )
    body = ",".join("{" + ",".join(_fields(event, ":", ",")) + "}" for event in events)
    return b'{"distributedInfo":{"rank":%d},"traceEvents":[%b]}' % (rank, body.encode())


def _fields(event: dict, colon: str, comma: str) -> list[str]:
    return [
        f'"{key}"{colon}' + (f"{value // 1000}.{value % 1000:03d}" if key in ("ts", "dur") and isinstance(value, int)
                             else json.dumps(value, ensure_ascii=False, separators=(comma, colon)))
        for key, value in event.items()
    ]  # fmt: skip


def kind(event: dict) -> str | None:
    """What an event of a GPU does: "memory", "communication" or "compute"; None for events of other kinds."""
    if event.get("cat") in MEMORY:
        return "memory"
    if event.get("cat") != "kernel":
        return None
    return "communication" if event["name"].startswith("nccl") else "compute"


def truth(events: list[dict]) -> dict[str, int]:
    """The true figures of a GPU's events, in ns, from a sweep over all begins and ends."""
    return sweep([(found, event["ts"], event["ts"] + event["dur"]) for event in events if (found := kind(event))])


def sweep(spans: list[tuple[str, int | Fraction, int | Fraction]], window: tuple | None = None) -> dict:
    """How long events of each kind, events of any kind, and compute together with communication were running, in ns.

    spans: tuples (kind, begin, end). window: (begin, end) of the time that counts; None: all spans.
    """
    edges = [(at, kind, change) for kind, begin, end in spans for at, change in ((begin, 1), (end, -1))]
    edges.sort(key=lambda edge: edge[0])
    begin, finish = window or (edges[0][0], edges[-1][0])
    running: Counter = Counter()
    time: Counter = Counter()
    last = edges[0][0]
    for at, kind, change in edges:
        passed = max(0, min(at, finish) - max(last, begin))
        on = {name for name, count in running.items() if count}
        for name in on:
            time[name] += passed
        time["busy"] += passed if on else 0
        time["overlap"] += passed if {"compute", "communication"} <= on else 0
        running[kind] += change
        last = at
    span = finish - begin
    return {
        "span_ns": span, "compute_ns": time["compute"], "communication_ns": time["communication"], "memory_ns": time["memory"],
        "idle_ns": span - time["busy"], "non_compute_ns": time["busy"] - time["compute"], "overlap_ns": time["overlap"],
    }  # fmt: skip
