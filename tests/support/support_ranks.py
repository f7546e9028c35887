"""Generates traces of several ranks whose figures are known by construction, or can be counted nanosecond by nanosecond."""

import gzip
import random
from collections.abc import Iterable
from pathlib import Path

import support_traces as support

from shardlab.runs.rundir import RunDir

GEMM, COPY = "gemm_kernel", "Memcpy DtoD (Device -> Device)"
NCCL = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"  # RCCL launches this kernel for every collective
FLASH = "aten::_scaled_dot_product_flash_attention"
KINDS = {  # Kineto's name of a collective, our name, and whether the message size is the size of the output
    "allreduce": ("all_reduce", False),
    "_allgather_base": ("all_gather", True),
    "_reduce_scatter_base": ("reduce_scatter", False),
    "broadcast": ("broadcast", False),
}


class RankOfRun:
    """One rank of a generated run: its trace events and its collective calls.

    events: the trace events; their times are in ns.
    calls: tuples (name, step, start in ns, end in ns, message size in bytes, waiting time in ns).
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: list[dict] = []
        self.calls: list[tuple[str, int, int, int, int, int]] = []
        self._correlation = 0

    def annotate(self, name: str, begin: int, end: int, *, tid: int = 1, cat: str = "user_annotation", **args) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": begin, "dur": end - begin, "args": args}
        self.events.append(event)

    def launch(self, cat: str, name: str, stream: int, launched: int, begin: int, end: int, *, tid: int = 1, **args) -> None:
        """Add a kernel or copy, and the call of 3 ns that launched it.

        launched: the time of the call in ns; None: the trace has no record of the call.
        """
        self._correlation += 1
        link = {"correlation": self._correlation}
        if launched is not None:
            self.annotate("cudaLaunchKernel", launched, launched + 3, tid=tid, cat="cuda_runtime", **link)
        self.annotate(name, begin, end, tid=stream, cat=cat, stream=stream, **link, **args)

    def text(self, *, host: str = "node0", gpu: str = "NVIDIA H100 80GB HBM3") -> bytes:
        head = b'{"host_name": "%b", "deviceProperties": [{"id": 0, "name": "%b"}, {"id": 1, "name": "%b"}],' % (
            host.encode(), gpu.encode(), gpu.encode(),
        )  # fmt: skip
        return support.text(self.events, self.rank).replace(b"{", head, 1)

    def write(self, folder: Path, *, gz: bool = False, **said: str) -> Path:
        path = folder / f"rank-{self.rank:05d}.json{'.gz' if gz else ''}"
        path.write_bytes(gzip.compress(self.text(**said), 1) if gz else self.text(**said))
        return path


def arguments(kind: str, elements: int, size: int, ranks: str, name: str = "3") -> dict:
    """The arguments that Kineto records for a collective with `elements` bfloat16 elements per rank."""
    whole = elements * size
    said = {"_allgather_base": (elements, whole), "_reduce_scatter_base": (whole, elements)}.get(kind, (elements, elements))
    return {
        "Collective name": kind, "In msg nelems": said[0], "Out msg nelems": said[1], "Group size": size, "dtype": "BFloat16",
        "Process Group Name": name, "Process Group Description": "shards", "Process Group Ranks": ranks,
    }  # fmt: skip


def run(seed: int, *, size: int = 3, steps: int = 2) -> list[RankOfRun]:
    """Generate the ranks of a run. The times of all ranks are of one clock.

    Collectives that synchronize end at the same time on all ranks, so the waiting time of each rank is known. All times are
    below 10 us.
    """
    pick = random.Random(seed)
    ranks = [RankOfRun(rank) for rank in range(size)]
    now = 1000
    for step in range(steps):
        begin = now
        # For each rank, the time in ns at which its stream for collectives is free.
        free = [now + pick.randint(20, 60) for _ in ranks]
        for _ in range(pick.randint(1, 4)):
            kind = pick.choice(list(KINDS))
            name, is_output = KINDS[kind]
            elements = pick.randint(1, 500)
            starts = [at + pick.randint(0, 50) for at in free]
            transfer = pick.randint(1, 40)
            end = max(starts) + transfer
            for rank, start in zip(ranks, starts, strict=True):
                size_text = str(list(range(size)))
                args = arguments(kind, elements, size, size_text)
                launched = start - pick.randint(4, 15)
                rank.launch("kernel", NCCL, 20, launched, start, end, **args)
                message = 2 * elements * (size if is_output or kind == "_reduce_scatter_base" else 1)
                rank.calls.append((name, step, start, end, message, max(starts) - start))
            free = [end + pick.randint(0, 30) for _ in ranks]
        for rank in ranks:
            at = begin + pick.randint(5, 40)
            for _ in range(pick.randint(1, 6)):
                cat, kernel = pick.choice([("kernel", GEMM), ("kernel", GEMM), ("gpu_memcpy", COPY)])
                long = pick.randint(1, 60)
                launched = None if seed % 7 == 0 and pick.random() < 0.1 else at - pick.randint(0, 30)
                rank.launch(cat, kernel, pick.choice((7, 7, 20 if cat == "gpu_memcpy" else 7)), launched, at, at + long)
                at += long + pick.randint(0, 40)
            free.append(at)
        now = max(free) + pick.randint(5, 30)
        for rank in ranks:
            # Steps follow each other without a gap, because kernels that are launched outside of steps do not count.
            rank.annotate(f"ProfilerStep#{step + 5}", begin - (5 if step else 40), now - 5)
    return ranks


def kernels(rank: RankOfRun) -> list[dict]:
    return [event for event in rank.events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]


def is_collective(event: dict) -> bool:
    return event["name"].startswith("nccl")


def moments(events: list[dict]) -> set[int]:
    """The set of all nanoseconds at which at least one of the events is running."""
    return {ns for event in events for ns in range(event["ts"], event["ts"] + event["dur"])}


def rank_with_layers(number: int, more: int) -> RankOfRun:
    """Two steps of a model with two layers and attention. more: additional ns of every kernel."""
    rank = RankOfRun(number)
    for step in range(2):
        at = 1000 * step
        rank.annotate(f"ProfilerStep#{step}", at, at + 1000)
        rank.annotate("nn.Module: Model_0", at + 10, at + 400, cat="python_function")
        for place, name in enumerate(("Linear_0", "Linear_1")):
            begin = at + 20 + 180 * place
            rank.annotate(f"nn.Module: {name}", begin, begin + 170, cat="python_function")
            numbers = {"Sequence number": 2 * step + place, "Fwd thread id": 0}
            rank.annotate("aten::mm", begin + 10, begin + 40, cat="cpu_op", **{"Input Dims": [[16, 8], [8, 32]]}, **numbers)
            rank.launch("kernel", "gemm", 7, begin + 12, begin + 60, begin + 80 + more)
            args = {"Bytes": 64, "Total Allocated": 4096 + 64 * place, "Total Reserved": 8192, "Device Id": 0, "Device Type": 1}
            event = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": begin, "args": args}
            rank.events.append(event)
        rank.annotate(FLASH, at + 420, at + 440, cat="cpu_op")
        rank.launch("kernel", "flash_fwd_kernel", 7, at + 425, at + 450, at + 460 + more)
        for place in (1, 0):
            begin = at + 700 - 120 * place
            args = {"Sequence number": 2 * step + place, "Fwd thread id": 1}
            rank.annotate("autograd::engine::evaluate_function: MmBackward0", begin, begin + 60, tid=2, cat="cpu_op", **args)
            rank.launch("kernel", "gemm", 7, begin + 10, begin + 30, begin + 70 + more, tid=2)
    return rank


def write_traces(folder: RunDir, ranks: Iterable[RankOfRun]) -> None:
    """Write the compressed traces of ranks into the folder of a run."""
    (folder.path / "trace").mkdir()
    for rank in ranks:
        rank.write(folder.path / "trace", gz=True)
