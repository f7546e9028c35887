"""Real steps that a rehearsal is compared with, and the rehearsals, all in one process that imports torch once.

Collectives: forked ranks over gloo. Memory: a step of one rank with real tensors, whose memory torch's profiler counts. The
profiler reports each allocation and release of torch's CPU allocator, also those inside operators, and shares no code with a
rehearsal, which follows the storages of tensors. The collectives of this step exchange nothing, because gloo takes memory of
its own, and how long it keeps that memory depends on when its threads run.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from support_e2e import HANG_S

from shardlab.runs import rehearsed

# Reads lines of JSON: a cell, what is measured in a real step ("memory", "collectives" or "nothing"), whether all blocks of the
# model are rehearsed, and the workload of the cell if a file defines it. Prints for each cell the result of the rehearsal and
# the measurement of each rehearsed rank.
SCRIPT = """
import json, os, signal, sys, tempfile, traceback
from collections import Counter
from pathlib import Path
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # for what libraries say
import msgspec, torch
from shardlab.matrix.cell import Cell
from shardlab.plugins.plugin_kind import OwnWorkload
from trainers import communication, menu
from trainers.instruments.timing import make_clock
from trainers.ranks.rank import Rank
from trainers.ranks.ranks import Ranks
from trainers.tasks import vision_library
vision_library.import_torchvision()
import deepspeed, transformers
import deepspeed.runtime.zero.muon.original_muon
from torch.profiler import ProfilerActivity, profile, record_function
import numpy as np
from trainers.rehearsal import rehearse
from trainers.rehearsal.fake_group import use_fake_group, register_averaging_hook, infer_neighbour_shapes

STEPS = 5  # before the last one; more than any strategy needs until one step is like the next

class Stepper:
    def __init__(self, cell, ranks):
        self.strategy, self.task = menu.find_strategy(cell.strategy), menu.find_workload_of_cell(cell).build(cell, Path(DATA))
        self.engine, self.clock = self.strategy.build(cell, self.task, ranks), make_clock(ranks.device)
        register_averaging_hook(self.engine.model if ranks.backend == "fake" else None)
        items = np.arange(cell.micro_batch_size)
        self.batches = [self.task.fetch(items, ranks.device) for _ in range(cell.gradient_accumulation_steps)]

    def step(self):
        self.clock.start()
        self.engine.forward_backward(self.batches, self.clock)
        self.engine.update()

def collectives(cell, number, store):
    ranks = Ranks(Rank(number, number, cell.world_size, store, False, cell.world_size), cell.servers)
    if number >= cell.gpus:
        menu.find_strategy(cell.strategy).build_server(
            cell, menu.find_workload_of_cell(cell).build(cell, Path(DATA)), ranks).serve()
        return None
    stepper = Stepper(cell, ranks)
    for _ in range(STEPS):
        stepper.step()
    with communication.count_collectives() as calls:
        stepper.step()
    stepper.engine.close()
    found = Counter((call.op, call.payload_bytes, call.ranks) for call in calls)
    return sorted([*key, times] for key, times in found.items())

def memory(cell, number, _):
    allocations = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with use_fake_group(number, cell.world_size) as ranks, allocations as profiled:
        build_task = menu.find_workload_of_cell(cell).build
        with infer_neighbour_shapes(lambda: rehearse._make_fake_hidden(cell, build_task(cell, Path(DATA)))):
            stepper = Stepper(cell, ranks)
            for _ in range(STEPS):
                stepper.step()
            with record_function("the last step"):
                stepper.step()
    events = list(profiled.profiler.kineto_results.events())
    last = next(event for event in events if event.name() == "the last step")
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()
        if last.start_ns() <= event.start_ns() <= last.end_ns():
            peak = max(peak, live)
    return peak

def forked(measure, cell, numbers):
    folder, children = tempfile.mkdtemp(), set()
    for number in numbers:
        if (child := os.fork()) == 0:
            code = 1
            try:
                Path(folder, str(number)).write_text(json.dumps(measure(cell, number, folder + "/store")))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
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
    return [json.loads(Path(folder, str(number)).read_text()) for number in numbers]

for line in sys.stdin:
    cell, real, full_depth, own = msgspec.convert(json.loads(line), type=tuple[Cell, str, bool, OwnWorkload | None])
    if own is not None:
        menu.add_own_workload(own, Path(own.file))
    answer = rehearse.rehearse_cell(cell, Path(DATA), full_depth=full_depth)
    measured = None
    if real == "memory":
        measured = forked(memory, cell, [rank.rank for rank in answer.ranks])
    elif real == "collectives":
        every = forked(collectives, cell, range(cell.world_size))
        measured = [every[rank.rank] for rank in answer.ranks]
    out.write(json.dumps([msgspec.to_builtins(answer), measured]) + chr(10))
    out.flush()
"""


class Rehearser:
    """The process that rehearses and measures cells. It imports torch once for all cells of a test module."""

    def __init__(self):
        code = SCRIPT.replace("DATA", repr(tempfile.mkdtemp()))
        # With AVX-512, oneDNN allocates workspaces for products in bf16, whose size depends on the processor.
        alike = {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2", "GLOO_SOCKET_IFNAME": "lo"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env={**os.environ, **alike}, cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def __call__(self, cell, real="nothing", *, full_depth=False, own=None):
        """Rehearse a cell. Returns (the result of the rehearsal, the measurement of each rehearsed rank).

        real: what is also measured in a real step: "memory", "collectives" or "nothing" (then None replaces the measurements).
        full_depth: rehearse all blocks. own: the workload of the cell if a file defines it, with the path of this file.
        """
        self._process.stdin.write(msgspec.json.encode((cell, real, full_depth, own)) + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], HANG_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self._errors.seek(0)
            raise AssertionError(self._errors.read().decode()[-3000:])
        answer, measured = json.loads(line)
        return rehearsed.decode_answer(msgspec.json.encode(answer)), measured

    def close(self):
        """End the process."""
        self._process.stdin.close()
        self._process.wait(HANG_S)
        self._process.stdout.close()
        self._errors.close()
