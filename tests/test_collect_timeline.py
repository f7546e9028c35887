"""`collect timeline`: records of several hosts on one clock, the rank for which others wait, and the file for Perfetto."""

import gzip
import json

import numpy as np
import pytest
import support_collect as support

from collect import figure
from collect.cli import main
from collect.figures import step_timeline
from collect.loading import load
from collect.loading.loaded_run import LoadedRun
from collect.sources import steps
from collect.summary import summarize
from collect.timeline import perfetto, straggler, timeline
from collect.timeline.clocks import Clocks
from collect.traces.breakdown import Breakdown
from shardlab.record import CLOCK, SCHEMA, Event, LineWriter, NicSample, Sample, StepRecord
from shardlab.workspace import Workspace

START_S = 1_760_000_000.0
# Maps each host to (seconds by which its clock is ahead of the clock of rank 0's host at the start, the same after 100 s).
AHEAD_S = {"node0": (0.0, 0.0), "node1": (5.0, 5.2)}


def compared(host, rank, at_s, offset_s, data=None):
    data = {"when": "start", "offset_s": offset_s, "within_s": 0.001} | (data or {})
    return Event(schema=SCHEMA, event=CLOCK, writer=f"rank-{rank:05d}", wall_s=at_s + offset_s, host=host, data=data)


def clocks():
    """The events in which two hosts recorded by how much their clocks differ, at the start and after 100 s."""
    first = {"node0": 0, "node1": 2}
    ends = [(START_S, 0), (START_S + 100, 1)]
    return [compared(host, first[host], at_s, AHEAD_S[host][end]) for host in first for at_s, end in ends]


@pytest.fixture
def run(tmp_path):
    """A run of four ranks on two hosts whose clocks differ. In true time, all ranks end each step at the same moment."""
    cell = support.cell("ddp", 4, nnodes=2, dp=4, micro_batch_size=2)
    folder = support.prepare(Workspace(tmp_path), cell)
    for event in clocks():
        with LineWriter(folder.events_file(event.writer)) as lines:
            lines.write(event)
    for rank in range(4):
        host = "node1" if rank > 1 else "node0"
        with LineWriter(folder.steps_file(rank)) as lines:
            for step in range(1, 11):
                wall_s = by(host, START_S + 10 * step)
                lines.write(StepRecord(schema=SCHEMA, step=step, t_s=wall_s, wall_s=wall_s, units=8, step_ms=9000.0))
    for host in AHEAD_S:
        with LineWriter(folder.samples_file(host)) as lines:
            for tick in range(11):
                wall_s, sent = by(host, START_S + 10 * tick), NicSample(name="eth<0>", kind="physical", tx_bytes=10**7 * tick)
                sample = {"t_s": wall_s, "wall_s": wall_s, "host": host, "boot_id": "boot", "cpu_pct": 50.0, "nics": [sent]}
                lines.write(Sample(schema=SCHEMA, **sample))
    return folder


def by(host, true_s):
    """The time that the clock of a host shows at the true time `true_s`. The error of the clock grows linearly."""
    start, end = AHEAD_S[host]
    return true_s + start + (end - start) * (true_s - START_S) / 100


def test_what_happened_at_once_on_two_hosts_is_at_one_place(run):
    found = timeline.of_run(LoadedRun.read(run))
    assert not found.uncorrected
    assert [(spans.host, spans.row) for spans in found.steps] == [
        ("node0", "rank 0"), ("node0", "rank 1"), ("node1", "rank 2"), ("node1", "rank 3"),
    ]  # fmt: skip
    for spans in found.steps:
        assert spans.end_s == pytest.approx(START_S + 10 * np.arange(1, 11), abs=0.001)
        assert spans.end_s - spans.start_s == pytest.approx(9.0)
    busy = {counter.host: counter.at_s for counter in found.counters if counter.unit == "%"}
    assert busy["node1"] == pytest.approx(busy["node0"], abs=0.001)
    (sent,) = (counter for counter in found.counters if counter.name == "eth<0> sent" and counter.host == "node0")
    assert (sent.unit, sent.values) == ("MB/s", pytest.approx(np.ones(10)))


def test_a_host_whose_clock_was_not_compared_is_said(run):
    run.events_file("rank-00002").unlink()
    found = timeline.of_run(LoadedRun.read(run))
    assert found.uncorrected == ["node1"]


@pytest.mark.parametrize("damage", [{"offset_s": "5"}, {"offset_s": None}, {"within_s": [1]}])
def test_a_damaged_comparison_is_no_comparison(damage):
    assert not Clocks([compared("node1", 2, START_S, 5.0, data=damage)], []).is_known("node1")


def test_ranks_are_on_the_host_whose_first_rank_is_nearest_below():
    found = Clocks(clocks(), [])
    assert [found.host_of(rank) for rank in range(4)] == ["node0", "node0", "node1", "node1"]
    assert Clocks([], ["only"]).host_of(7) == "only"
    assert Clocks([], ["a", "b"]).host_of(0) is None
    assert found.of_host["node1"].drift_s == pytest.approx(0.2)


def timed(*ranks):
    """A data frame of five timed steps. ranks: for each rank, the times (data, forward, backward, optimizer) in ms."""
    records = {
        rank: [
            StepRecord(
                schema=SCHEMA, step=step, t_s=step, wall_s=step, units=8, step_ms=sum(parts),
                data_ms=parts[0], forward_ms=parts[1], backward_ms=parts[2], optimizer_ms=parts[3],
            )
            for step in range(1, 6)
        ]
        for rank, parts in enumerate(ranks)
    }  # fmt: skip
    return steps.frames(steps.Recorded(records, len(ranks), len(ranks))).timed


@pytest.mark.parametrize(
    ("ranks", "rank", "phase"),
    [
        ([(1, 30, 60, 9), (1, 45, 45, 9), (1, 30, 60, 9)], 1, "forward"),  # ranks 0 and 2 wait in backward
        ([(1, 30, 60, 9), (1, 30, 60, 9), (16, 30, 45, 9)], 2, "data"),
        ([(1, 30, 60, 24), (1, 30, 60, 9), (1, 30, 60, 9)], 0, "optimizer"),
    ],
)
def test_the_straggler_is_late_in_the_first_phase_that_differs(ranks, rank, phase):
    found = straggler.by_phases(timed(*ranks))
    assert (found.rank, found.phase, found.late_ms) == (rank, phase, pytest.approx(15))
    assert found.share_pct == pytest.approx(15)


@pytest.mark.parametrize("ranks", [[(1, 30, 60, 9)] * 3, [(1, 30, 60, 9)], [(1, 32, 58, 9), (1, 30, 60, 9)]])
def test_small_differences_and_a_single_rank_make_no_straggler(ranks):
    assert straggler.by_phases(timed(*ranks)) is None


def profiled(rank, communication_ms, span_ms=100):
    times = {"compute_ns": 0, "memory_ns": None, "non_compute_ns": 0, "idle_ns": 0, "overlap_ns": 0}
    lists = {"collectives": [], "kernels": []}
    ns = {"span_ns": 2 * span_ms * 10**6, "communication_ns": 2 * communication_ms * 10**6}
    return Breakdown(rank=rank, source="gpu", steps=2, **ns, **times, **lists)


def test_the_rank_that_waits_least_in_collectives_is_the_straggler():
    found = straggler.by_traces([profiled(0, 40), profiled(1, 41), profiled(2, 10), profiled(3, 40)])
    assert (found.rank, found.late_ms) == (2, pytest.approx(30))
    assert straggler.by_traces([profiled(0, 40), profiled(1, 41)]) is None
    assert straggler.by_traces([profiled(0, 40)]) is None


@pytest.mark.parametrize("name", ["timeline.json", "timeline.json.gz"])
def test_perfettos_file_has_every_rank_and_host(run, tmp_path, name, capsys):
    path = tmp_path / name
    argv = ["timeline", run.run_id, "--perfetto", str(path), "--workspace", str(run.path.parent.parent), "--json"]
    assert main(argv) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["clocks"][1]["offset_s"] == [5.0, 5.2]
    with gzip.open(path) if name.endswith(".gz") else path.open() as handle:
        document = json.load(handle)
    events = document["traceEvents"]
    assert len(events) == told["events"]
    assert document["otherData"]["uncorrected_hosts"] == []
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {f"rank {rank}" for rank in range(4)}
    hosts = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"node0", "node1"} <= set(hosts.values())
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 40
    assert all(event["ts"] >= 0 for event in events if "ts" in event)
    ends = {round((event["ts"] + event["dur"]) / 1e6, 2) for event in spans if event["name"] == "step 3"}
    assert len(ends) == 1  # all four ranks end step 3 at the same moment, as in true time


def test_profiled_events_are_on_the_same_clock(run, tmp_path):
    (run.path / "trace").mkdir()
    began_us = 1e6 * 7
    event = {"ph": "X", "name": "gemm", "cat": "kernel", "pid": 0, "tid": 7, "ts": began_us, "dur": 1000, "args": {"stream": 7}}
    head = {"distributedInfo": {"rank": 2}, "baseTimeNanoseconds": int(by("node1", START_S) * 1e9)}
    with gzip.open(run.path / "trace" / "rank-00002.json.gz", "wt") as handle:
        json.dump(head | {"traceEvents": [event]}, handle)
    (spans,) = timeline.profiled(LoadedRun.read(run))
    assert (spans.host, spans.row, spans.names) == ("node1", "rank 2 profiled: 7", ["gemm"])
    assert spans.start_s == pytest.approx([START_S + 7], abs=0.02)
    found = timeline.of_run(LoadedRun.read(run))
    perfetto.write(tmp_path / "t.json", found, [spans])
    (written,) = [event for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if event["name"] == "gemm"]
    assert written["dur"] == pytest.approx(1000, abs=3)  # in µs, corrected for node1's clock, which is 0.2 % too fast


def test_a_run_without_records_is_refused(tmp_path, capsys):
    folder = support.prepare(Workspace(tmp_path), support.cell())
    assert main(["timeline", folder.run_id, "--workspace", str(tmp_path)]) == 2
    assert "no steps and no telemetry" in capsys.readouterr().err


def drawn(tmp_path, *ranks):
    """The timeline figure of a cell with 30 steps of 100 ms.

    ranks: for each rank, the times (data, forward, backward, optimizer) of every step in ms.
    """
    workspace, cell = Workspace(tmp_path), support.cell("ddp", len(ranks), steps=30, warmup_steps=0)
    support.keep(workspace, [cell], repeats=1)
    folder = support.prepare(workspace, cell)
    for rank, (data, forward, backward, optimizer) in enumerate(ranks):
        with LineWriter(folder.steps_file(rank)) as lines:
            for step in range(1, 31):
                times = {"data_ms": data, "forward_ms": forward, "backward_ms": backward, "optimizer_ms": optimizer}
                moments = {"t_s": step / 10, "wall_s": START_S + step / 10}
                lines.write(StepRecord(schema=SCHEMA, step=step, units=8, step_ms=100.0, loss=1.0, **moments, **times))
    support.environment(folder)
    support.finish(folder, 3.0)
    loaded = load.load(workspace, None)
    (group,) = figure.groups(loaded, summarize(loaded, "ddp"))
    return step_timeline.draw(group)


def test_the_figure_has_the_middle_steps_of_each_rank_and_names_the_straggler(tmp_path):
    found = drawn(tmp_path, (1.0, 30.0, 60.0, 9.0), (1.0, 50.0, 39.0, 9.0))
    assert "The others wait for: ddp ×2: rank 1, forward." in found.caption
    bars = {trace["name"]: trace for trace in found.data}
    forward, backward, other = bars["forward"], bars["backward"], bars["other"]
    assert forward["y"] == ["rank 0"] * 10 + ["rank 1"] * 10
    assert forward["text"][:10] == [f"step {number}" for number in range(11, 21)]
    assert forward["x"] == [30.0] * 10 + [50.0] * 10
    assert forward["base"][:2] == [pytest.approx(1.0), pytest.approx(101.0)]
    assert backward["base"][10] == pytest.approx(51.0)
    assert other["x"] == [pytest.approx(1.0)] * 10  # rank 1: 100 ms per step, minus 99 ms of phases


def test_there_is_no_figure_of_a_single_rank(tmp_path):
    assert drawn(tmp_path, (1.0, 30.0, 60.0, 9.0)) is None
