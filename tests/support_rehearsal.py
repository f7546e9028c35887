"""Real runs that a rehearsal is compared with: forked ranks over gloo, whose memory torch's profiler counts.

The profiler reports each allocation and release of torch's CPU allocator, also those inside operators. It shares no code with
a rehearsal, which follows the storages of tensors. Memory that gloo takes inside its collectives is left out: NCCL has buffers
of its own instead, and how long gloo keeps its copies depends on when its threads run.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from support_line import HANG_S

# As many steps before the last one as make a step like the next; the rehearsal has a list of its own.
STEPS = 5

# Reads cells from standard input. Prints for each cell one line per rank: the peak of the last step in bytes, without what was
# in use before the engine was built, and the collectives of a further step.
REAL_RANKS = """
import bisect, json, os, signal, sys, tempfile, traceback
from collections import Counter
from pathlib import Path
sys.path.insert(0, "TESTS")
import msgspec, torch
from shardlab.cell import Cell
from trainers import communication, menu
from trainers.instruments.timing import clock_for
from trainers.rank import Rank
from trainers.ranks import Ranks
from trainers.tasks import vision_library
vision_library.load()
import deepspeed, transformers
import deepspeed.runtime.zero.muon.original_muon
from torch.profiler import ProfilerActivity, profile, record_function
import numpy as np
torch.manual_seed(1)

def rank(number, store, cell):
    import torch.distributed as dist
    ranks = Ranks(Rank(number, number, cell.world_size, store, False, cell.world_size), cell.servers)
    strategy = menu.strategy(cell.strategy)
    task = menu.workload_of(cell).build(cell, Path("DATA"))
    if strategy.servers and number >= cell.gpus:
        strategy.build_server(cell, task, ranks).serve()
        return None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine, clock = strategy.build(cell, task, ranks), clock_for(ranks.device)
        items = np.arange(cell.micro_batch_size)
        batches = [task.fetch(items, ranks.device) for _ in range(cell.gradient_accumulation_steps)]
        for step in range(STEPS):
            with record_function(f"step {step}"):
                clock.start()
                engine.forward_backward(batches, clock)
                engine.update()
    peak = peak_of(profiled)
    clock.start()
    with communication.counting() as calls:
        engine.forward_backward(batches, clock)
        engine.update()
    engine.close()
    found = Counter((call.op, call.payload_bytes, call.ranks) for call in calls)
    return [peak, sorted([*key, times] for key, times in found.items())]

def peak_of(profiled):
    file = tempfile.mktemp(suffix=".json")
    profiled.export_chrome_trace(file)
    events = json.loads(Path(file).read_text())["traceEvents"]
    os.unlink(file)
    last = next(event for event in events if event.get("name") == f"step {STEPS - 1}" and event["ph"] == "X")
    main = last["tid"]
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events
                   if e["ph"] == "X" and e["name"].startswith("c10d::") and e["tid"] == main)
    begins = [begin for begin, _ in spans]
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: (e["ts"], e["args"]["Ev Idx"]))
    live, peak, of_gloo = 0, 0, set()
    for change in changes:
        at, nbytes, address = change["ts"], change["args"]["Bytes"], change["args"]["Addr"]
        if nbytes > 0:
            place = bisect.bisect_right(begins, at) - 1
            if change["tid"] != main or (place >= 0 and at <= spans[place][1]):
                of_gloo.add(address)
                continue
        elif address in of_gloo:
            of_gloo.discard(address)
            continue
        live += nbytes
        if last["ts"] <= at <= last["ts"] + last["dur"]:
            peak = max(peak, live)
    return peak

for line in sys.stdin:
    cell = msgspec.json.decode(line, type=Cell)
    folder = tempfile.mkdtemp()
    children = set()
    for number in range(cell.world_size):
        if (child := os.fork()) == 0:
            code = 1
            try:
                found = rank(number, folder + "/store", cell)
                Path(folder, str(number)).write_text(json.dumps(found))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.add(child)
    while children:
        child, status = os.wait()
        children.discard(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
    print("RANKS", json.dumps([json.loads(Path(folder, str(n)).read_text()) for n in range(cell.world_size)]), flush=True)
"""


def real(cells):
    """For each cell the list over its ranks of (peak bytes, collectives as [op, payload_bytes, ranks, times])."""
    code = REAL_RANKS.replace("TESTS", str(Path(__file__).parent)).replace("DATA", tempfile.mkdtemp())
    code = code.replace("STEPS", str(STEPS))
    done = subprocess.run(
        [sys.executable, "-c", code], input=b"\n".join(map(msgspec.json.encode, cells)), capture_output=True, check=False,
        timeout=HANG_S, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    lines = [json.loads(line.removeprefix(b"RANKS ")) for line in done.stdout.splitlines() if line.startswith(b"RANKS ")]
    assert len(lines) == len(cells), done.stderr.decode()[-3000:]
    return lines
