"""Writes small recordings of one rank as Kineto writes them, event by event. Times are in microseconds."""

import json

ALL_TO_ALL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class Recording:
    """The events of one rank. Kernels and copies are launched by calls with the same correlation."""

    def __init__(self, rank=None, world_size=None, backend=None):
        self.events = []
        info = {"backend": backend, "rank": rank, "world_size": world_size}
        self.info = {key: value for key, value in info.items() if value is not None}
        self._correlation = 0

    def add(self, category, name, ts, dur, tid=1, **args):
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}
        self.events.append(event)

    def step(self, number, ts, dur):
        self.add("user_annotation", f"ProfilerStep#{number}", ts, dur)

    def launch(self, ts, *, call="cudaLaunchKernel", at=None, dur=50, stream=7, device=0, lost=False, call_us=5, **more):
        """Adds a call that launches work, and the work itself, which starts `at`, unless it is lost."""
        self._correlation += 1
        driver = "cuda_driver" if call.startswith("cu") and not call.startswith("cuda") else "cuda_runtime"
        self.add(driver, call, ts, call_us, correlation=self._correlation)
        if not lost:
            category = "gpu_memcpy" if "Memcpy" in call else "gpu_memset" if "Memset" in call else "kernel"
            args = {"device": device, "stream": stream, "correlation": self._correlation}
            self.add(category, more.pop("name", "gemm"), ts + 10 if at is None else at, dur, tid=stream, **args, **more)

    def write(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"distributedInfo": self.info, "traceEvents": self.events}))
        return path


def collective(name, elements, ranks, **more):
    """The arguments of the kernel of a collective. ranks: the ranks of its process group."""
    return {
        "Collective name": name, "In msg nelems": elements, "Out msg nelems": elements, "Group size": len(ranks),
        "dtype": "BFloat16", "Process Group Name": "3", "Process Group Description": "mesh_tp",
        "Process Group Ranks": str(list(ranks)),
    } | more  # fmt: skip
