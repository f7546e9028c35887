"""Measures what it costs to read traces: processor seconds and peak memory of `collect trace` and of other programs.

    python benchmarks/trace.py [--ranks 8] [--mb 50] [--gz] [--folder FOLDER] [--rounds 3] [--peer PYTHON]

All programs read the same files: the traces in FOLDER or, without --folder, traces that the benchmark writes in the form in
which Kineto writes traces of a GPU. These have 219 bytes per event, and 9 % of their events are kernels (real traces had 224 to
319 bytes and 6 to 8 %). --peer: a Python with HolisticTraceAnalysis (HTA), pysimdjson or orjson; packages that it does not have
are left out. pysimdjson and orjson only parse each file and read no event, so they show a lower bound of the time.

Each program runs in its own process, and the programs take turns. The table has the median of the processor seconds and the
largest peak memory. Ratios are relative to `collect trace --like-hta`, which computes the same figures as HTA does here.
"""

from __future__ import annotations

import argparse
import compileall
import gzip
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
OURS = "collect trace --like-hta"
LIKE_HTA = """
import sys
from pathlib import Path
from collect.traces import hta, trace
hta.compute_hta_breakdowns([trace.read_trace(path) for path in sorted(Path(sys.argv[1]).glob("rank-*"))])
"""
BOTH = """
import sys
from pathlib import Path
from collect.traces import hta, trace
from collect.traces.breakdown import compute_breakdown
traces = [trace.read_trace(path) for path in sorted(Path(sys.argv[1]).glob("rank-*"))]
assert all(compute_breakdown(one) and not one.lost_counts and not one.cut_reason for one in traces)
hta.compute_hta_breakdowns(traces)
"""
ANSWERS = """
import sys
from pathlib import Path
from collect.traces import trace
from collect.traces.breakdown import compute_breakdown
from collect.traces.rank_analysis import analyse_rank
from collect.traces.run_answers import RunAnswers
traces = [trace.read_trace(path) for path in sorted(Path(sys.argv[1]).glob("rank-*"))]
assert all(compute_breakdown(one) for one in traces)
assert RunAnswers([analyse_rank(one) for one in traces]).make_document()["stragglers"]["matched"] or len(traces) == 1
"""
HTA = """
import logging, sys
logging.disable(logging.CRITICAL)
from pathlib import Path
from hta.trace_analysis import TraceAnalysis
paths = {int(path.name[5:10]): str(path) for path in Path(sys.argv[1]).glob("rank-*")}
analysis = TraceAnalysis(trace_files=paths, trace_dir=sys.argv[1])
analysis.get_temporal_breakdown(visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
analysis.get_gpu_kernel_breakdown(visualize=False)
"""
BOUND = """
import gzip, sys
from pathlib import Path
import {module}
for path in Path(sys.argv[1]).glob("rank-*"):
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    {call}
"""
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1_execute_segment_k_off_kernel__5x_cublas"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SHAPES = '"Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"], "Input Dims": [[1280], [8192, 1280], []], '
EVENT = """  {{
    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},
    "ts": {ts}, "dur": {dur},
    "args": {{
      "External id": {id}, {args}"Ev Idx": {id}
    }}
  }},
"""
FLOW = '  {{\n    "ph": "{ph}", "id": {id}, "pid": 1, "tid": 1, "ts": {ts},\n    "cat": "ac2g", "name": "ac2g"\n  }},\n'
KERNEL = (
    '"device": 0, "context": 1,\n      "stream": {stream}, "correlation": {id},\n      "registers per thread": 168,\n'
    '      "blocks per SM": 9.697, "warps per SM": 38.79,\n      "grid": [1280, 1, 1],\n      "block": [128, 1, 1],\n      '
)
MIX = (("cpu_op", "aten::linear"), ("cpu_op", "aten::addmm"), ("cpu_op", "aten::empty"), ("cuda_runtime", "cudaEventRecord"))


def write(path: Path, rank: int, size: float) -> None:
    """Write a trace of a rank with at least `size` bytes before compression, and with at least three steps."""
    pick, now, number, written, step = random.Random(rank), 4_458_676_522_000_000, 1000, 0, 0
    with gzip.open(path, "wb", 6) if path.suffix == ".gz" else path.open("wb") as file:
        file.write(b'{\n  "schemaVersion": 1,\n  "distributedInfo": {"rank": %d},\n  "traceEvents": [\n' % rank)
        while written < size or step < 3:
            begin, parts = now, []
            for index in range(1200):
                for cat, name in MIX:
                    more = SHAPES if cat == "cpu_op" else '"cbid": 135, '
                    parts.append(_event(cat, name, 1, now, 9000 + number % 999, number, more))
                    parts.append(FLOW.format(ph="s", id=number, ts=_us(now)) * (name != "aten::empty"))
                    number += 1
                communicates = index % 40 == 39
                stream = 20 if communicates else 7
                parts.append(
                    _event("cuda_runtime", "cudaLaunchKernel", 1, now + 900, 3100, number, f'"correlation": {number}, ')
                )
                lasts = pick.randint(9000, 30_000) * (20 if communicates else 1)
                kernel = KERNEL.format(stream=stream, id=number)
                parts.append(_event("kernel", NCCL if communicates else GEMM, stream, now + 8000, lasts, number, kernel))
                parts.append(FLOW.format(ph="f", id=number, ts=_us(now)) * 2)
                number += 1
                now += pick.randint(19_000, 31_000)
            parts.append(_event("user_annotation", f"ProfilerStep#{step}", 1, begin, now - begin - 1000, number, ""))
            text = "".join(parts).encode()
            written, step = written + len(text), step + 1
            file.write(text)
        file.write(b'  {\n    "ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 0\n  }\n  ]\n}\n')


def _event(cat: str, name: str, tid: int, ts: int, dur: int, number: int, args: str) -> str:
    return EVENT.format(cat=cat, name=name, pid=1, tid=tid, ts=_us(ts), dur=_us(dur), id=number, args=args)


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def cost(python: str, code: str, folder: Path) -> tuple[float, float]:
    """Run a program. Returns (processor time in seconds, memory of the largest process in 1e6 bytes), child processes included.

    python: the interpreter. code: the program. folder: the folder of the traces, which is the argument of the program.
    """
    meter = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode; "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime, used.ru_maxrss); "
        "sys.exit(done)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", meter, python, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    seconds, kib = done.stdout.split()
    return float(seconds), float(kib) * 1024 / 1e6


def rivals(peer: str | None) -> dict[str, tuple[str, str]]:
    """(interpreter, program) of each trace reader that can run here, by name. peer: the Python interpreter that has the trace
    readers of other projects; None: they are left out."""
    found = {
        OURS: (sys.executable, LIKE_HTA),
        "collect trace, both modes": (sys.executable, BOTH),
        "collect trace with answers": (sys.executable, ANSWERS),
    }
    others = {
        "HolisticTraceAnalysis": ("hta", HTA),
        "simdjson, parse alone": ("simdjson", BOUND.format(module="simdjson", call="simdjson.Parser().parse(text)")),
        "orjson, parse alone": ("orjson", BOUND.format(module="orjson", call="orjson.loads(text)")),
    }
    for name, (module, code) in others.items():
        if peer and subprocess.run([peer, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0:
            found[name] = (peer, code)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="(default: 8)")
    parser.add_argument("--mb", type=float, default=50, help="of text a rank (default: 50)")
    parser.add_argument("--gz", action="store_true", help="gzipped, as trainers write them")
    parser.add_argument("--folder", type=Path, help="of traces named rank-00000.json or rank-00000.json.gz, and so on")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--peer", metavar="PYTHON", help="a Python that has HolisticTraceAnalysis, pysimdjson or orjson")
    arguments = parser.parse_args()
    programs = rivals(arguments.peer)
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for package in ("collect", "shardlab"):
        # as pip does when it installs a package, so that no round compiles the modules
        compileall.compile_dir(ROOT / package, quiet=1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        for rank in range(0 if arguments.folder else arguments.ranks):
            write(folder / f"rank-{rank:05d}.json{'.gz' if arguments.gz else ''}", rank, arguments.mb * 1e6)
        for _ in range(arguments.rounds):
            for name, (python, code) in programs.items():
                costs[name].append(cost(python, code, folder))
    ours = statistics.median(seconds for seconds, _ in costs[OURS])
    generated = f"{arguments.ranks} x {arguments.mb:g} MB{' gzipped' if arguments.gz else ''}"
    print(f"{arguments.folder or generated}, median of {arguments.rounds} rounds")
    for name, found in costs.items():
        seconds = statistics.median(one for one, _ in found)
        print(f"{name:26} {seconds:8.2f} CPU s {max(mb for _, mb in found):8.0f} MB {seconds / ours:7.2f} times ours")


if __name__ == "__main__":
    main()
