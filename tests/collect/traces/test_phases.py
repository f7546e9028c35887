"""The phases of a training step (data, forward, backward, ...) are found by annotations, by autograd and by the order of
events. The work of a GPU belongs to the phase that launched it."""

import gzip
import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import support_ranks as support
from support_e2e import HANG_S

from collect.traces import trace
from collect.traces.phases import PhaseTime
from collect.traces.rank_analysis import analyse_rank

HERE = Path(__file__).parents[2]


def told(folder, rank) -> dict[str, PhaseTime]:
    return {time.phase: time for time in analyse_rank(trace.read_trace(rank.write(folder))).phases}


def step(rank, begin: int, *, autograd_thread: int = 2) -> None:
    """Adds the events of a step of 200 ns: 10 ns data, 60 forward, 80 backward, 10 clipping, 30 optimizer, 10 other."""
    rank.annotate(f"ProfilerStep#{begin}", begin, begin + 200)
    rank.annotate("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin, begin + 10)
    rank.annotate("aten::linear", begin + 20, begin + 60, cat="cpu_op")
    for at in (70, 112):  # the gap between these two spans counts as backward, because the main thread begins no operator in it
        node = "autograd::engine::evaluate_function: MmBackward0"
        rank.annotate(node, begin + at, begin + at + 38, cat="cpu_op", tid=autograd_thread)
    rank.annotate("aten::mul", begin + 151, begin + 159, cat="cpu_op")
    rank.annotate("Optimizer.step#AdamW.step", begin + 160, begin + 190)


def test_the_phases_of_an_example_have_their_times(tmp_path):
    rank = support.RankOfRun(0)
    for begin in (0, 1000):
        step(rank, begin)
        rank.launch("gpu_memcpy", "Memcpy HtoD", 7, begin + 3, begin + 15, begin + 20)
        # This kernel belongs to forward and ends after backward has begun.
        rank.launch("kernel", "gemm", 7, begin + 30, begin + 40, begin + 90)
        rank.launch("kernel", "gemm", 7, begin + 80, begin + 95, begin + 130, tid=2)
        rank.launch("kernel", support.NCCL, 20, begin + 115, begin + 120, begin + 150, tid=2)
        rank.launch("kernel", "adam", 7, begin + 165, begin + 168, begin + 230)
    rank.launch("kernel", "after the last step", 7, 1500, 1510, 1600)
    rank.launch("kernel", "launched by nothing that is recorded", 7, None, 1700, 1710)
    found = told(tmp_path, rank)
    assert {phase: time.host_ns for phase, time in found.items()} == {
        "data": 20,
        "forward": 2 * 60,
        "backward": 2 * 80,
        "optimizer": 2 * 30,
        "other": 2 * 20,
    }
    assert {phase: (time.device_ns, time.compute_ns, time.communication_ns) for phase, time in found.items()} == {
        "data": (10, 0, 0),
        "forward": (100, 100, 0),
        "backward": (2 * 55, 70, 60),
        "optimizer": (2 * 62, 124, 0),
        "other": (0, 0, 0),
    }


def test_annotations_of_users_name_phases(tmp_path):
    rank = support.RankOfRun(0)
    rank.annotate("ProfilerStep#3", 0, 100)
    for name, begin, end in (
        ("## data ##", 0, 10),
        ("forward", 10, 40),
        ("## backward ##", 40, 80),
        ("optimizer_step", 80, 95),
    ):
        rank.annotate(name, begin, end)
    rank.annotate("forwarding address", 96, 97)  # this is not the word `forward`, so it is no phase
    rank.annotate("aten::mm", 12, 30, cat="cpu_op")
    assert {phase: time.host_ns for phase, time in told(tmp_path, rank).items()} == {
        "data": 10,
        "forward": 30,
        "backward": 40,
        "optimizer": 15,
        "other": 5,
    }


def test_accumulation_alternates_forward_and_backward(tmp_path):
    rank = support.RankOfRun(0)
    rank.annotate("ProfilerStep#3", 0, 100)
    for begin in (0, 50):
        rank.annotate("aten::mm", begin + 2, begin + 20, cat="cpu_op")
        rank.annotate("autograd::engine::evaluate_function: X", begin + 25, begin + 45, cat="cpu_op")
    found = told(tmp_path, rank)
    assert {phase: time.host_ns for phase, time in found.items()} == {"forward": 55, "backward": 40, "other": 5}


def test_without_steps_there_are_no_phases(tmp_path):
    rank = support.RankOfRun(0)
    rank.launch("kernel", "gemm", 7, 0, 5, 10)
    assert told(tmp_path, rank) == {}


TRAIN = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, record_function
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader([torch.ones(64) for _ in range(32)], batch_size=8)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    batches = iter(loader)
    for step in range(2):
        with record_function(f"ProfilerStep#{step}"):
            batch = next(batches)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
profiler.export_chrome_trace(sys.argv[1])
"""


def test_the_phases_of_a_real_training_agree_with_its_annotations(tmp_path):
    """The times of the phases on the host agree with torch's own annotations in the trace. On CPUs, autograd runs on the main
    thread."""
    path = tmp_path / "rank-0.json.gz"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", TRAIN, path], check=True, timeout=HANG_S, env=environment)
    found = {time.phase: time.host_ns for time in analyse_rank(trace.read_trace(path)).phases}
    loaded = json.loads(gzip.decompress(path.read_bytes()), parse_float=Fraction)

    def spans(start: str) -> list[tuple[int, int]]:
        events = [event for event in loaded["traceEvents"] if event["ph"] == "X" and event["name"].startswith(start)]
        return [(int(event["ts"] * 1000), int((event["ts"] + event["dur"]) * 1000)) for event in events]

    steps, nodes = spans("ProfilerStep#"), spans("autograd::engine::evaluate_function")
    data, optimizer = spans("enumerate(DataLoader)#"), spans("Optimizer.")
    assert found["data"] == sum(end - begin for begin, end in data)
    assert found["optimizer"] == sum(end - begin for begin, end in optimizer)
    inside = [[node for node in nodes if begin <= node[0] < end] for begin, end in steps]
    first, last = ([pick(node[side] for node in one) for one in inside] for pick, side in ((min, 0), (max, 1)))
    assert found["backward"] == sum(last) - sum(first)
    begins = [begin for begin, _ in steps]
    assert found["forward"] == sum(first) - sum(begins) - found["data"]
    assert sum(found.values()) == sum(end - begin for begin, end in steps)


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_the_metric_is_the_time_on_the_gpu(tmp_path, phase):
    """The metric of a phase counts the kernels that the phase launched."""
    import support_collect

    from collect.metrics.trace_phases import measure_phase_time
    from collect.traces.run_traces import RunTraces

    rank = support.RankOfRun(0)
    step(rank, 0)
    for at in (5, 30, 120, 170):
        rank.launch("kernel", "gemm", 7, at, at + 6, at + 6 + at)
    run = support_collect.loaded(support_collect.cell())
    run.__dict__["traces"] = RunTraces([], [analyse_rank(trace.read_trace(rank.write(tmp_path)))])
    launched = {"data": 5, "forward": 30, "backward": 120, "optimizer": 170}
    assert measure_phase_time(run, phase).value == pytest.approx(launched[phase] / 1e6)
    assert measure_phase_time(run, "nothing") is None
