"""`collect timeline`: records of several hosts on one clock, the rank that the others wait for, and the file for Perfetto."""

import gzip
import json

import numpy as np
import pytest
import support_collect as support

from collect import figure
from collect.cli import main
from collect.figures import timelines
from collect.loading.loaded_run import LoadedRun
from collect.reading import load
from collect.sources import steps
from collect.summary import summarize
from collect.timeline import perfetto, straggler, timeline
from collect.timeline.clocks import HostClocks
from collect.traces.breakdown import Breakdown
from shardlab.runs import instrument_span
from shardlab.runs.record import CLOCK_EVENT, SCHEMA, Event, GpuSample, LineWriter, NicSample, Sample, StepRecord
from shardlab.workspace.workspace import Workspace

START_S = 1_760_000_000.0
# seconds by which a host's clock is ahead of the clock of rank 0's host, at the start and after 100 s
AHEAD_S = {"node0": (0.0, 0.0), "node1": (5.0, 5.2)}


def compared(host, rank, at_s, offset_s, data=None):
    data = {"when": "start", "offset_s": offset_s, "within_s": 0.001} | (data or {})
    return Event(schema=SCHEMA, event=CLOCK_EVENT, writer=f"rank-{rank:05d}", wall_s=at_s + offset_s, host=host, data=data)


def clocks():
    """The events of clock comparisons, for two hosts with two ranks each."""
    first = {"node0": 0, "node1": 2}
    ends = [(START_S, 0), (START_S + 100, 1)]
    return [compared(host, first[host], at_s, AHEAD_S[host][end]) for host in first for at_s, end in ends]


@pytest.fixture
def run(tmp_path):
    """Four ranks on two hosts whose clocks differ. All ranks end each step at the same moment."""
    cell = support.cell("ddp", 4, nnodes=2, dp=4, micro_batch_size=2)
    folder = support.prepare(Workspace(tmp_path), cell)
    for event in clocks():
        with LineWriter(folder.events_file(event.writer)) as lines:
            lines.write_record(event)
    for rank in range(4):
        host = "node1" if rank > 1 else "node0"
        with LineWriter(folder.steps_file(rank)) as lines:
            for step in range(1, 11):
                wall_s = by(host, START_S + 10 * step)
                lines.write_record(StepRecord(schema=SCHEMA, step=step, t_s=wall_s, wall_s=wall_s, units=8, step_ms=9000.0))
    for host in AHEAD_S:
        with LineWriter(folder.samples_file(host)) as lines:
            for tick in range(11):
                wall_s, sent = by(host, START_S + 10 * tick), NicSample(name="eth<0>", kind="physical", tx_bytes=10**7 * tick)
                sample = {"t_s": wall_s, "wall_s": wall_s, "host": host, "boot_id": "boot", "cpu_pct": 50.0, "nics": [sent]}
                lines.write_record(Sample(schema=SCHEMA, **sample))
    return folder


def by(host, true_s):
    """The time that the clock of a host shows at the true time `true_s`. The offset grows linearly."""
    start, end = AHEAD_S[host]
    return true_s + start + (end - start) * (true_s - START_S) / 100


def test_steps_that_end_together_on_two_hosts_have_equal_corrected_times(run):
    """After the correction of clocks, steps that ended together on two hosts have equal times."""
    found = timeline.build_timeline(LoadedRun.read(run))
    assert not found.uncorrected_hosts
    assert [(spans.host, spans.row_name) for spans in found.steps] == [
        ("node0", "rank 0"), ("node0", "rank 1"), ("node1", "rank 2"), ("node1", "rank 3"),
    ]  # fmt: skip
    for spans in found.steps:
        assert spans.end_s == pytest.approx(START_S + 10 * np.arange(1, 11), abs=0.001)
        assert spans.end_s - spans.start_s == pytest.approx(9.0)
    busy = {counter.host: counter.at_s for counter in found.counters if counter.unit == "%"}
    assert busy["node1"] == pytest.approx(busy["node0"], abs=0.001)
    (sent,) = (counter for counter in found.counters if counter.name == "eth<0> sent" and counter.host == "node0")
    assert (sent.unit, sent.values) == ("MB/s", pytest.approx(np.ones(10)))


def test_a_played_gpu_is_marked_in_the_timeline(run):
    with LineWriter(run.samples_file("node0")) as lines:
        gpu = GpuSample(uuid="GPU-1", played=True, power_w=300.0)
        lines.write_record(Sample(schema=SCHEMA, t_s=1.0, wall_s=START_S + 101, host="node0", boot_id="boot", gpus=[gpu]))
    found = timeline.build_timeline(LoadedRun.read(run))
    assert [counter.name for counter in found.counters if "GPU" in counter.name] == ["GPU-1 (played) power"]


def test_a_host_without_a_clock_comparison_is_reported(run):
    run.events_file("rank-00002").unlink()
    found = timeline.build_timeline(LoadedRun.read(run))
    assert found.uncorrected_hosts == ["node1"]


@pytest.mark.parametrize("damage", [{"offset_s": "5"}, {"offset_s": None}, {"within_s": [1]}])
def test_a_damaged_comparison_is_no_comparison(damage):
    assert not HostClocks([compared("node1", 2, START_S, 5.0, data=damage)], []).is_known("node1")


def test_ranks_are_on_the_host_whose_first_rank_is_nearest_below():
    """The events name only the first rank of each host. The next ranks belong to the same host."""
    found = HostClocks(clocks(), [])
    assert [found.find_host(rank) for rank in range(4)] == ["node0", "node0", "node1", "node1"]
    assert HostClocks([], ["only"]).find_host(7) == "only"
    assert HostClocks([], ["a", "b"]).find_host(0) is None
    assert found.clock_by_host["node1"].drift_s == pytest.approx(0.2)


def timed(*ranks):
    """A frame of five timed steps. ranks: for each rank the times (data, forward, backward, optimizer) in ms."""
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
    return steps.build_step_frames(steps.RecordedSteps(records, len(ranks), len(ranks))).timed_steps


@pytest.mark.parametrize(
    ("ranks", "rank", "phase"),
    [
        ([(1, 30, 60, 9), (1, 45, 45, 9), (1, 30, 60, 9)], 1, "forward"),  # the other ranks wait in backward
        ([(1, 30, 60, 9), (1, 30, 60, 9), (16, 30, 45, 9)], 2, "data"),
        ([(1, 30, 60, 24), (1, 30, 60, 9), (1, 30, 60, 9)], 0, "optimizer"),
    ],
)
def test_the_straggler_is_late_in_the_first_phase_that_differs(ranks, rank, phase):
    found = straggler.find_straggler_by_phases(timed(*ranks))
    assert (found.rank, found.phase, found.late_ms) == (rank, phase, pytest.approx(15))
    assert found.share_pct == pytest.approx(15)


@pytest.mark.parametrize("ranks", [[(1, 30, 60, 9)] * 3, [(1, 30, 60, 9)], [(1, 32, 58, 9), (1, 30, 60, 9)]])
def test_small_differences_and_a_single_rank_make_no_straggler(ranks):
    """No rank is a straggler if it is late by less than 5 % of a step, or if there is only one rank."""
    assert straggler.find_straggler_by_phases(timed(*ranks)) is None


def profiled(rank, communication_ms, span_ms=100):
    times = {"compute_ns": 0, "memory_ns": None, "non_compute_ns": 0, "idle_ns": 0, "overlap_ns": 0}
    lists = {"collectives": [], "kernels": []}
    ns = {"span_ns": 2 * span_ms * 10**6, "communication_ns": 2 * communication_ms * 10**6}
    return Breakdown(rank=rank, source="gpu", steps=2, **ns, **times, **lists)


def test_the_rank_that_waits_least_in_collectives_is_the_straggler():
    found = straggler.find_straggler_by_traces([profiled(0, 40), profiled(1, 41), profiled(2, 10), profiled(3, 40)])
    assert (found.rank, found.late_ms) == (2, pytest.approx(30))
    assert straggler.find_straggler_by_traces([profiled(0, 40), profiled(1, 41)]) is None
    assert straggler.find_straggler_by_traces([profiled(0, 40)]) is None


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
    assert {"node0 (rehearsal)", "node1 (rehearsal)"} <= set(hosts.values())
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 40
    assert all(event["ts"] >= 0 for event in events if "ts" in event)
    ends = {round((event["ts"] + event["dur"]) / 1e6, 2) for event in spans if event["name"] == "step 3"}
    assert len(ends) == 1  # all four ranks on the two hosts end at the same moment


def test_profiled_events_are_on_the_same_clock(run, tmp_path):
    (run.path / "trace").mkdir()
    began_us = 1e6 * 7
    event = {"ph": "X", "name": "gemm", "cat": "kernel", "pid": 0, "tid": 7, "ts": began_us, "dur": 1000, "args": {"stream": 7}}
    head = {"distributedInfo": {"rank": 2}, "baseTimeNanoseconds": int(by("node1", START_S) * 1e9)}
    with gzip.open(run.path / "trace" / "rank-00002.json.gz", "wt") as handle:
        json.dump(head | {"traceEvents": [event]}, handle)
    (spans,) = timeline.list_trace_spans(LoadedRun.read(run))
    assert (spans.host, spans.row_name, spans.names) == ("node1", "rank 2 profiled: 7", ["gemm"])
    assert spans.start_s == pytest.approx([START_S + 7], abs=0.02)
    found = timeline.build_timeline(LoadedRun.read(run))
    perfetto.write_perfetto_file(tmp_path / "t.json", found, [spans])
    (written,) = [event for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if event["name"] == "gemm"]
    assert written["dur"] == pytest.approx(1000, abs=3)  # in us; the clock of node1 runs 0.2 % too fast


def saved(rank, host, true_s, seconds, step=3, damage=None):
    """The event of a checkpoint that ended at the true time `true_s`."""
    act = {"name": "checkpoints", "when": "after", "step": step, "seconds": seconds} | (damage or {})
    event = instrument_span.INSTRUMENT_EVENT
    return Event(schema=SCHEMA, event=event, writer=f"rank-{rank:05d}", wall_s=by(host, true_s), host=host, data=act)


def test_checkpoints_are_spans_on_the_corrected_clock(run, tmp_path, capsys):
    for rank, host, seconds in ((0, "node0", 1.0), (2, "node1", 0.5)):
        with LineWriter(run.events_file(f"rank-{rank:05d}")) as lines:
            lines.write_record(saved(rank, host, START_S + 31, seconds))
            for damage in ({"when": "during"}, {"step": None}, {"name": "x" * 65}):
                lines.write_record(saved(rank, host, START_S + 41, 0.5, damage=damage))
    found = timeline.build_timeline(LoadedRun.read(run))
    assert [(spans.host, spans.row_name, spans.names) for spans in found.instruments] == [
        ("node0", "rank 0 instruments", ["checkpoint after step 3"]),
        ("node1", "rank 2 instruments", ["checkpoint after step 3"]),
    ]
    assert [spans.end_s[0] - START_S for spans in found.instruments] == pytest.approx([31, 31], abs=0.001)
    assert [spans.start_s[0] - START_S for spans in found.instruments] == pytest.approx([30, 30.5], abs=0.001)
    assert instrument_span.INSTRUMENT_EVENT not in {moment.name for moment in found.moments}
    path = tmp_path / "t.json"
    assert main(["timeline", run.run_id, "--perfetto", str(path), "--workspace", str(run.path.parent.parent)]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "checkpoints 2 750 1000 rank 0, node0 checkpoint after step 3" in table
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "checkpoint after step 3"]
    assert sorted(event["dur"] for event in spans) == pytest.approx([0.5e6, 1e6])


def test_a_run_without_records_is_refused(tmp_path, capsys):
    folder = support.prepare(Workspace(tmp_path), support.cell())
    assert main(["timeline", folder.run_id, "--workspace", str(tmp_path)]) == 2
    assert "no steps and no telemetry" in capsys.readouterr().err


def drawn(tmp_path, *ranks, acts=()):
    """The figure of a cell with 30 steps.

    ranks: for each rank the times (data, forward, backward, optimizer) in ms. acts: events of instruments.
    """
    workspace, cell = Workspace(tmp_path), support.cell("ddp", len(ranks), steps=30, warmup_steps=0)
    support.keep(workspace, [cell], repeats=1)
    folder = support.prepare(workspace, cell)
    for rank, (data, forward, backward, optimizer) in enumerate(ranks):
        with LineWriter(folder.steps_file(rank)) as lines:
            for step in range(1, 31):
                times = {"data_ms": data, "forward_ms": forward, "backward_ms": backward, "optimizer_ms": optimizer}
                moments = {"t_s": step / 10, "wall_s": START_S + step / 10}
                lines.write_record(StepRecord(schema=SCHEMA, step=step, units=8, step_ms=100.0, loss=1.0, **moments, **times))
    for act in acts:
        with LineWriter(folder.events_file(act.writer)) as lines:
            lines.write_record(act)
    support.environment(folder)
    support.finish(folder, 3.0)
    loaded = load.load_matrix(workspace, None)
    (group,) = figure.group_by_workload(loaded, summarize(loaded, "ddp"))
    return timelines.draw_steps(group)


def test_the_figure_has_the_middle_steps_of_each_rank_and_names_the_straggler(tmp_path):
    found = drawn(tmp_path, (1.0, 30.0, 60.0, 9.0), (1.0, 50.0, 39.0, 9.0))
    assert f"The others wait for: ddp ×2: rank 1 on {support.HOST}, forward." in found.caption
    assert "instrument" not in {trace["name"] for trace in found.data}
    bars = {trace["name"]: trace for trace in found.data}
    forward, backward, other = bars["forward"], bars["backward"], bars["other"]
    assert forward["y"] == ["rank 0"] * 10 + ["rank 1"] * 10
    assert forward["text"][:10] == [f"step {number}" for number in range(11, 21)]
    assert forward["x"] == [30.0] * 10 + [50.0] * 10
    assert forward["base"][:2] == [pytest.approx(1.0), pytest.approx(101.0)]
    assert backward["base"][10] == pytest.approx(51.0)
    assert other["x"] == [pytest.approx(1.0)] * 10  # the phases of rank 1 take 99 ms of a step of 100 ms


def test_the_figure_has_the_steps_around_a_checkpoint(tmp_path):
    acts = [saved(rank, "node0", START_S + 0.61, 0.008, step=6) for rank in (0, 1)]
    acts += [saved(0, "node0", START_S + 3.02, 0.01, step=30)]  # not drawn: this checkpoint is after the last step
    found = drawn(tmp_path, (1.0, 30.0, 60.0, 9.0), (1.0, 50.0, 39.0, 9.0), acts=acts)
    bars = {trace["name"]: trace for trace in found.data}
    assert bars["forward"]["text"][:10] == [f"step {number}" for number in range(2, 12)]
    assert bars["instrument"]["y"] == ["rank 0", "rank 1"]
    assert bars["instrument"]["text"] == ["checkpoint after step 6"] * 2
    # step 2 begins 100 ms after START_S, and the checkpoint ends 610 ms after START_S
    assert bars["instrument"]["base"] == pytest.approx([502, 502], abs=0.01)
    assert bars["instrument"]["x"] == pytest.approx([8, 8])


def test_there_is_no_figure_of_a_single_rank(tmp_path):
    assert drawn(tmp_path, (1.0, 30.0, 60.0, 9.0)) is None


def test_a_whole_run_is_drawn_on_the_corrected_clock(run):
    """Four ranks on two hosts whose clocks are 5 s apart. All of them end each step at the same moment."""
    support.environment(run)
    support.finish(run, 100.0)
    for rank, host in ((0, "node0"), (2, "node1")):
        with LineWriter(run.events_file(f"rank-{rank:05d}")) as lines:
            lines.write_record(saved(rank, host, START_S + 30.6, 0.5))
    workspace = Workspace(run.path.parent.parent)
    cell = run.read_run().cell
    support.keep(workspace, [cell], repeats=1)
    loaded = load.load_matrix(workspace, None)
    (group,) = figure.group_by_workload(loaded, summarize(loaded, "ddp"))
    found = timelines.draw_run(group)
    bars = {trace["name"]: trace for trace in found.data if trace["type"] == "bar"}
    assert bars["steps"]["y"] == [f"rank {rank}" for rank in range(4) for _ in range(10)]
    assert bars["steps"]["base"] == pytest.approx([10 * step for step in range(10)] * 4, abs=0.01)
    assert bars["instruments between steps"]["y"] == ["rank 0", "rank 2"]
    assert bars["instruments between steps"]["base"] == pytest.approx([29.1] * 2, abs=0.01)  # the first step began at 1 s
    assert [entry["text"] for entry in found.layout["annotations"]] == ["Processors busy (%)", "Sent (MB/s)"]
    busy = [trace for trace in found.data if trace.get("yaxis") == "y2"]
    assert [trace["name"] for trace in busy] == ["node0 processors busy", "node1 processors busy"]
    assert busy[1]["x"] == pytest.approx(busy[0]["x"], abs=0.01)
    assert [trace["name"] for trace in found.data if trace.get("yaxis") == "y3"][1] == "node1 eth&lt;0&gt; sent"


def test_many_steps_are_drawn_as_stretches(monkeypatch):
    monkeypatch.setattr(timelines, "MOST_BARS", 4)
    names = ["warm-up step 1", *(f"step {number}" for number in range(1, 5)), "step 5 (with an instrument)", "step 6"]
    start_s = np.arange(7.0)
    bars = timelines._make_step_bars(timeline.RowSpans("h", "rank 0", names, start_s, start_s + 0.5), 0.0)
    assert [(bar.description, bar.start, bar.length) for bar in bars] == [
        ("warm-up step 1", 0, 0.5), ("step 1 to step 2", 1, 1.5), ("step 3 to step 4", 3, 1.5),
        ("step 5 (with an instrument)", 5, 0.5), ("step 6", 6, 0.5),
    ]  # fmt: skip
