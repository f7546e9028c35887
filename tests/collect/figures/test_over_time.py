"""Figures over time, over batch sizes and over ranks show the same values as the records and the metrics."""

import itertools
import json
import math

import msgspec
import polars as pl
import pytest
import support_collect as support

from collect import figure, summary
from collect.drawing import axes, curves, traces
from collect.figures import cell_rows, memory_over_time, scaling, telemetry
from collect.metrics import network
from collect.reading import load
from collect.sources import samples, steps
from shardlab.hardware.nvml import Gpu
from shardlab.runs.record import SCHEMA, GpuSample, LineWriter, NicSample, Sample, StepRecord, read_records
from shardlab.workspace.workspace import Workspace

GPUS = [Gpu(uuid="0", name="A", memory_bytes=1000), Gpu(uuid="1", name="A", memory_bytes=1000)]


def sample(t, host="a", **what):
    return Sample(schema=1, t_s=t, wall_s=t, host=host, boot_id="boot", **what)


def nic(t, sent, host="a", name="eth0", kind="physical"):
    return sample(t, host, nics=[NicSample(name=name, kind=kind, tx_bytes=int(sent), rx_bytes=0)])


def curve_of(readings, how):
    """The curve of these readings of one run, as points (middle of a time interval in seconds, value).

    The first timed step ends at 0 s. how: how the curves of several hosts become one curve, such as "sum".
    """
    found = curves.join_devices(readings, how)
    return [(found["run"].first_s + place * found["run"].width_s, value) for place, value in enumerate(found["run"].values)]


def of_a_run(rows):
    return rows.with_columns(run=pl.lit("run"))


def frames(*recorded):
    return samples.build_sample_frames({"hosts": list(recorded)})


def test_a_finger_that_is_dragged_over_a_figure_scrolls_the_page():
    assert axes.make_layout({}, {}, showlegend=True)["dragmode"] is False


def test_a_curve_of_rates_holds_the_bytes_that_the_metric_counts():
    sent = [(t / 2, 1000 * (t + 10 * math.sin(t))) for t in range(2000)]
    # Each value is replaced by the largest value so far, because a counter of bytes never decreases.
    sent = [(t, max(value for other, value in sent[: place + 1])) for place, (t, value) in enumerate(sent)]
    seen = frames(*(nic(t, value) for t, value in sent))
    found = curves.join_devices(curves.read_rates(of_a_run(seen.nics), "tx_bytes"), "sum")["run"]
    assert len(found.values) <= curves.STRETCHES + 1
    start = found.first_s - found.width_s / 2
    span = (start + 10 * found.width_s, start + 60 * found.width_s)
    ends = [StepRecord(schema=1, step=place, t_s=t, wall_s=t, units=1, step_ms=1.0) for place, t in enumerate(span, 1)]
    run = support.loaded(support.cell(), step_records={0: ends})
    run.samples = seen
    counted = network.measure_network_bytes(run)
    assert sum(found.values[10:60]) * found.width_s == pytest.approx(counted.value)


def test_hosts_that_sample_at_other_moments_are_added_up():
    one = [nic(t, 100 * t, "a") for t in range(100)]
    other = [nic(t + 0.37, 200 * t, "b") for t in range(60)]
    points = curve_of(curves.read_rates(of_a_run(frames(*one, *other).nics), "tx_bytes"), "sum")
    both = [value for moment, value in points if 1 < moment < 58]
    assert both == pytest.approx([300] * len(both))
    # After 60 s only host a has samples. The sum over both hosts is then unknown, so the curve has no value.
    assert [value for moment, value in points if moment > 61] == []


def test_gpus_and_hosts_are_aggregated_as_in_their_metrics():
    seen = [
        sample(t, host, cpu_pct=cpu, gpus=[GpuSample(uuid=uuid, utilization_pct=gpu, memory_used_bytes=used)])
        for t in range(20)
        for host, uuid, cpu, gpu, used in (("a", "0", 20.0, 90.0, 500), ("b", "1", 40.0, 70.0, 800 if t == 9 else 300))
    ]
    found = frames(*seen)
    assert {value for _, value in curve_of(curves.read_levels(of_a_run(found.hosts), "host", "cpu_pct"), "mean")} == {30}
    assert {value for _, value in curve_of(curves.read_levels(of_a_run(found.gpus), "uuid", "utilization_pct"), "mean")} == {80}
    assert (
        max(value for _, value in curve_of(curves.read_levels(of_a_run(found.gpus), "uuid", "memory_used_bytes"), "max")) == 800
    )


def test_growth_is_of_all_interfaces_since_0_s_and_ends_where_a_counter_began_anew():
    one = [nic(t, 100 * t + 7, "a") for t in range(-5, 50)]
    other = [nic(t, 200 * t + 9000 if t < 30 else 0, "b") for t in range(-5, 50)]
    points = dict(curve_of(curves.make_growth_readings(of_a_run(frames(*one, *other).nics), "tx_bytes"), "sum"))
    assert {moment: value for moment, value in points.items() if moment < 29.5} == pytest.approx(
        {place + 0.5: 300 * (place + 1) for place in range(29)}
    )
    assert not [value for moment, value in points.items() if moment > 30 and value is not None]


def test_a_gap_in_the_samples_is_a_gap_in_the_curve():
    seen = [sample(t, cpu_pct=50.0) for t in range(1000) if not 300 <= t < 350]
    points = curve_of(curves.read_levels(of_a_run(frames(*seen).hosts), "host", "cpu_pct"), "mean")
    blank = [moment for moment, value in points if value is None]
    assert all(295 < moment < 355 for moment in blank)
    assert len(blank) >= 9
    assert [value for _, value in points if value is not None] == pytest.approx([50] * (len(points) - len(blank)))


def test_one_sample_that_is_missing_is_no_gap():
    seen = [sample(t, cpu_pct=None if t == 50 else 50.0) for t in range(100) if t != 70]
    assert {value for _, value in curve_of(curves.read_levels(of_a_run(frames(*seen).hosts), "host", "cpu_pct"), "mean")} == {
        50.0
    }


@pytest.mark.parametrize("at_50", [nic(50, 0), msgspec.structs.replace(nic(50, 9000), boot_id="another")])
def test_a_counter_that_went_back_or_began_anew_says_nothing_of_that_time(at_50):
    seen = [at_50 if t == 50 else nic(t, 100 * t) for t in range(50)] + [at_50]
    seen += [
        msgspec.structs.replace(nic(t, at_50.nics[0].tx_bytes + 100 * (t - 50)), boot_id=at_50.boot_id) for t in range(51, 100)
    ]
    points = curve_of(curves.read_rates(of_a_run(frames(*seen).nics), "tx_bytes"), "sum")
    assert [moment for moment, value in points if value is None] == [49.5]
    assert [value for _, value in points if value is not None] == pytest.approx([100] * (len(points) - 1))


def test_a_peak_of_memory_survives_thinning():
    seen = [sample(t, gpus=[GpuSample(uuid="0", memory_used_bytes=999 if t == 4321 else 5)]) for t in range(10_000)]
    points = curve_of(curves.read_levels(of_a_run(frames(*seen).gpus), "uuid", "memory_used_bytes"), "max")
    assert len(points) <= curves.STRETCHES + 1
    assert [abs(moment - 4321) <= 50 for moment, value in points if value == 999] == [True]


def test_thinned_lines_keep_what_is_not_known():
    y = [None if 500 <= place < 503 else float(place % 7) for place in range(3000)]
    x, thinned = traces.thin_points(range(3000), y, 100)
    assert len(x) <= 103
    at = thinned.index(None)
    assert x[at - 1] < 503
    assert x[at + 1] >= 500
    assert {0.0, 6.0} <= set(thinned)


def test_a_run_without_samples_has_no_curve():
    empty = frames()
    assert curves.join_devices(curves.read_rates(of_a_run(empty.nics), "tx_bytes"), "sum") == {}
    assert curves.join_devices(curves.read_levels(of_a_run(empty.hosts), "host", "cpu_pct"), "mean") == {}
    alone = frames(sample(1, cpu_pct=1.0))
    assert curves.join_devices(curves.read_levels(of_a_run(alone.hosts), "host", "cpu_pct"), "mean") == {}


def group_of(workspace, baseline="single"):
    loaded = load.load_matrix(workspace, None)
    (group,) = figure.group_by_workload(loaded, summary.summarize(loaded, baseline))
    return group


def watched(folder, ended, **fields):
    """Write telemetry of a machine with two GPUs and several network interfaces, with a gap from 0.5 s to 0.8 s.

    ended: the end of the run, in seconds after its start. fields: further fields of the samples.
    """
    with LineWriter(folder.samples_file(support.HOST)) as lines:
        for tick in range(int((ended + 1) * 50)):
            t = tick / 50 - 0.5
            if not 0.5 < t < 0.8:
                nics = [
                    NicSample(name=name, kind=kind, tx_bytes=int(rate * tick / 50), rx_bytes=0)
                    for name, kind, rate in (
                        ("eno1", "physical", 1e4), ("<b>ib0", "physical", 5e8), ("ens9", "physical", 0), ("d0", "virtual", 7),
                        ("lo", "loopback", 2e6),
                    )
                ]  # fmt: skip
                gpus = [
                    GpuSample(uuid=gpu.uuid, utilization_pct=60.0 + 20 * place, memory_used_bytes=250 + 500 * place)
                    for place, gpu in enumerate(GPUS)
                ]
                moment = {"t_s": t + 1, "wall_s": support.START_S + t, "host": support.HOST, "boot_id": "boot"}
                pressure = {"cpu_pressure_s": 5 + t / 4, "memory_pressure_s": 3.0}
                busy = {"cpu_pct": 25.0, "cores_pct": [5.0, 65.0, 5.0]}
                what = pressure | busy | {"memory_used_bytes": 3 * 2**30, "gpus": gpus, "nics": nics}
                lines.write_record(Sample(schema=SCHEMA, **moment, **(what | fields)))


def titles(drawn):
    return [entry["text"] for entry in drawn.layout["annotations"]]


def panel(drawn, title):
    """Maps the label of each line in one panel of a figure to the line. title: the start of the panel's title."""
    number = next(place for place, text in enumerate(titles(drawn), 1) if text.startswith(title))
    return {line["name"]: line for line in drawn.data if line["yaxis"] == ("y" if number == 1 else f"y{number}")}


def known(line):
    return [value for value in line["y"] if value is not None]


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory):
    """A workspace with a completed cell on a machine with GPUs and several network interfaces, and with a failed cell."""
    workspace = Workspace(tmp_path_factory.mktemp("gpus"))
    ran, failed = support.cell(), support.cell("ddp", 2)
    support.keep(workspace, [ran, failed], repeats=1)
    folder = support.completed(workspace, ran, gpus=GPUS, gpu=True)
    folder.samples_file(support.HOST).unlink()
    watched(folder, 3.5)
    support.failed(workspace, failed, 1, "RuntimeError: no")
    return workspace


def test_panels_show_the_numbers_of_the_metrics(on_gpus):
    group = group_of(on_gpus)
    drawn = telemetry.draw_hosts(group)
    metrics = group.marks[0].row.metrics
    for title, metric in (("GPU memory", "gpu_memory_pct"), ("GPUs busy", "gpu_pct"), ("Processors busy", "cpu_pct")):
        (line,) = panel(drawn, title).values()
        values = known(line)
        assert values == pytest.approx([metrics[metric].value] * len(values))
        blank = [line["x0"] + place * line["dx"] for place, value in enumerate(line["y"]) if value is None]
        first_s = steps.find_timed_window(group.marks[0].cell.completed_runs[0].timed_steps)[0] - support.START_S
        assert all(0.4 < moment + first_s < 0.9 for moment in blank)
        assert len(blank) * line["dx"] == pytest.approx(0.3, abs=2 * line["dx"] + 0.02)
        assert not line["connectgaps"]
    (busiest,) = panel(drawn, "Busiest processor").values()
    assert set(known(busiest)) == {65.0}
    assert len(panel(drawn, "GPU memory")) == 1  # the failed cell has no line
    json.dumps(drawn.data, allow_nan=False)


def test_a_panel_whose_lines_are_all_hidden_has_an_invisible_trace(on_gpus, monkeypatch):
    """Without a visible trace, plotly draws the axis of the panel at no place, and the browser reports an error."""
    monkeypatch.setattr(telemetry, "order_by_visibility", lambda marks: [(mark, "legendonly") for mark in marks])
    drawn = telemetry.draw_hosts(group_of(on_gpus))
    visible = [line for line in drawn.data if line.get("visible") != "legendonly"]
    assert [line["yaxis"] for line in visible] == list(dict.fromkeys(line["yaxis"] for line in drawn.data))
    assert all(line["y"] == [None] for line in visible)


def test_networks_are_distinguished_by_name_and_loopback_is_called_so(on_gpus):
    drawn = telemetry.draw_hosts(group_of(on_gpus))
    assert [title for title in titles(drawn) if title.startswith("Sent")] == [
        "Sent on the network, &lt;b&gt;ib0 (MB/s)",
        "Sent on the network, eno1 (MB/s)",
        "Sent over loopback, within a host (MB/s)",
    ]
    for title, rate in (("Sent on the network, &lt;b&gt;ib0", 500), ("Sent on the network, eno1", 0.01), ("Sent over loop", 2)):
        (line,) = panel(drawn, title).values()
        assert known(line) == pytest.approx([rate] * len(known(line)), rel=1e-3)
    assert "which is the control network" in drawn.caption
    (line,) = panel(drawn, "All bytes sent on the network since").values()
    at = [(line["x0"] + place * line["dx"], value) for place, value in enumerate(line["y"]) if value is not None]
    rates = [(value - before) / (t - then) for (then, before), (t, value) in itertools.pairwise(at)]
    assert rates == pytest.approx([500.01] * len(rates), rel=0.15)  # both interfaces together, in MB/s
    assert at[-1][1] == pytest.approx(500.01 * at[-1][0], rel=0.02)


def test_waiting_of_tasks_is_the_growth_of_the_kernels_counter(on_gpus):
    """A quarter of each second a task waits for a processor. No task waits for memory, so there is no panel for memory."""
    drawn = telemetry.draw_hosts(group_of(on_gpus))
    (line,) = panel(drawn, "Tasks waiting for processors (% of time)").values()
    assert known(line) == pytest.approx([25.0] * len(known(line)))
    assert not [title for title in titles(drawn) if "waiting for memory" in title or "waiting for disks" in title]


def test_without_gpus_there_is_no_panel_of_gpus(tmp_path):
    workspace = Workspace(tmp_path)
    support.keep(workspace, [support.cell()], repeats=1)
    folder = support.completed(workspace, support.cell())
    drawn = telemetry.draw_hosts(group_of(workspace))
    assert cell_rows.draw_utilization(group_of(workspace)) is None
    assert titles(drawn) == [
        "All bytes sent on the network since the first timed step (MB)",
        "Sent on the network, eth0 (MB/s)", "Received on the network, eth0 (MB/s)",
        "Sent over loopback, within a host (MB/s)", "Processors busy (%)", "Memory of the hosts in use (GiB)",
    ]  # fmt: skip
    assert "control network" not in drawn.caption
    (line,) = panel(drawn, "Sent on the network").values()
    assert known(line) == pytest.approx([1.048] * len(line["y"]), rel=2e-3)
    folder.samples_file(support.HOST).unlink()
    assert telemetry.draw_hosts(group_of(workspace)) is None


def test_a_resumed_run_is_in_no_figure_over_time(tmp_path):
    workspace = Workspace(tmp_path)
    support.keep(workspace, [support.cell()], repeats=1)
    support.completed(workspace, support.cell(), found={"resumed_from_step": 4})
    group = group_of(workspace)
    assert telemetry.draw_hosts(group) is None
    assert memory_over_time.draw_memory_by_run(group) is None


def test_utilization_is_marked_as_in_the_table_rows(on_gpus):
    group = group_of(on_gpus)
    drawn = cell_rows.draw_utilization(group)
    marks = [(entry["x"][0], entry["y"][0]) for entry in drawn.data if "error_x" in entry]
    label = group.marks[0].label
    names = ("gpu_pct", "gpu_memory_pct", "cpu_pct")
    assert marks == [(group.marks[0].row.metrics[name].value, label) for name in names]
    assert drawn.data[0]["text"] == ["  failed"]
    assert [entry["name"] for entry in drawn.data if "name" in entry] == [
        "GPUs busy",
        "GPU memory in use, maximum",
        "processors busy",
    ]


def test_memory_by_run_is_the_largest_rank_and_blank_during_profiled_steps(tmp_path):
    """The figure shows the rank with the most memory, and has no value at a step that an instrument observed."""
    workspace = Workspace(tmp_path)
    what = support.cell("ddp", 2)
    support.keep(workspace, [what], repeats=1)
    folder = support.completed(workspace, what, gpu=True)
    path = folder.steps_file(1)
    records = read_records(path, StepRecord).records
    path.unlink()
    with LineWriter(path) as lines:
        for record in records:
            lines.write_record(msgspec.structs.replace(record, watched=record.step == 4 and not record.warmup))
    group = group_of(workspace)
    (line,) = memory_over_time.draw_memory_by_run(group).data
    peak = group.marks[0].row.metrics["peak_memory_bytes"].value / 2**30
    assert line["y"] == [None if step == 4 else pytest.approx(peak, rel=1e-4) for step in range(1, 11)]
    rows = group.marks[0].cell.completed_runs[0].timed_steps.filter(pl.col("rank") == 0)["wall_s"]
    assert line["x"] == pytest.approx((rows - rows[0]).to_list(), abs=1e-3)


def sweep(tmp_path, cells):
    workspace = Workspace(tmp_path)
    support.keep(workspace, cells, repeats=1)
    for what in cells:
        if what.global_batch_size == 64:
            support.failed(workspace, what, 1, "CUDA out of memory")
        else:
            support.completed(workspace, what, gpu=True)
    return group_of(workspace)


def batch(size, strategy="single", gpus=1, **other):
    return support.cell(strategy, gpus, global_batch_size=size, micro_batch_size=size // gpus, **other)


def test_the_batch_sizes_of_a_strategy_are_a_line_that_ends_at_out_of_memory(tmp_path):
    """Cells of a strategy that differ only in batch size are one line. A size that ran out of memory is marked `oom`."""
    alone = batch(8, "ddp", 2)
    accumulated = support.cell(global_batch_size=32, micro_batch_size=8, gradient_accumulation_steps=4)
    group = sweep(tmp_path, [batch(16), batch(8), batch(64), batch(32), alone, accumulated])
    drawn = scaling.draw_batch_sizes(group)
    above, below, missing = drawn.data
    rows = {mark.cell.cell.name(): mark.row.metrics for mark in group.marks}
    ran = [rows[batch(size).name()] for size in (8, 16, 32)]
    assert (above["name"], above["x"]) == ("single ×1", [8, 16, 32])
    assert above["y"] == [metrics["throughput_per_s"].value for metrics in ran]
    assert below["y"] == pytest.approx([metrics["peak_memory_bytes"].value / 2**30 for metrics in ran])
    assert (missing["x"], missing["text"]) == ([64], ["oom"])
    assert drawn.layout["xaxis"]["tickvals"] == [8, 16, 32, 64]


def test_one_batch_size_is_no_line(tmp_path):
    group = sweep(tmp_path, [batch(8), batch(8, "ddp", 2), batch(64)])
    assert scaling.draw_batch_sizes(group) is None


def test_lines_of_scaling_hold_the_batch_or_the_batch_of_a_rank(tmp_path):
    """Each line over ranks has a constant global batch or a constant batch per rank."""
    cells = [
        support.cell(),
        support.cell("ddp", 2),
        support.cell("ddp", 4, micro_batch_size=1, gradient_accumulation_steps=2),
        batch(8, "fsdp2"),
        batch(16, "fsdp2", 2),
        batch(32, "fsdp2", 4),
        support.cell("fsdp2", 8),
        support.cell("zero3", 8),
    ]
    drawn = scaling.draw_scaling(sweep(tmp_path, cells))
    lines = {line["name"]: line["x"] for line in drawn.data}
    assert lines == {"ddp": [2, 4], "fsdp2": [1, 8], "fsdp2, batch 8 per rank": [1, 2, 4], "zero3": [8], "ideal": [1, 8]}


def test_of_many_cells_the_comparable_ones_are_drawn_first_and_the_rest_wait(tmp_path):
    """Only the lines of cells on 4 ranks are visible at first. The other lines can be switched on in the legend."""
    cells = [
        batch(8 * size, strategy, gpus) for strategy in ("single", "ddp", "fsdp2") for gpus in (1, 2, 4) for size in (1, 2)
    ]
    cells = [what for what in cells if what.strategy != "single" or what.gpus == 1]
    workspace = Workspace(tmp_path)
    support.keep(workspace, cells, repeats=1)
    drawn = figure.order_by_visibility(group_of(workspace).marks)
    assert len(drawn) == len(cells) == 14
    shown = [mark for mark, visible in drawn if visible is True]
    assert [mark.label for mark in shown] == ["ddp ×4", "ddp ×4, batch 16", "fsdp2 ×4", "fsdp2 ×4, batch 16"]
    assert [mark.look.dash for mark in shown] == ["solid", "dash"] * 2
    assert {visible for _, visible in drawn[len(shown) :]} == {"legendonly"}


def test_of_too_many_cells_on_the_same_ranks_those_of_one_batch_are_drawn_first(tmp_path):
    cells = [batch(8 * size, strategy) for strategy in ("ddp", "fsdp2") for size in range(1, 8)] + [batch(80, "ddp")]
    workspace = Workspace(tmp_path)
    support.keep(workspace, cells, repeats=1)
    drawn = figure.order_by_visibility(group_of(workspace).marks)
    assert [mark.label for mark, visible in drawn if visible is True] == ["ddp ×1", "fsdp2 ×1"]


def test_figures_are_of_so_many_cells_at_most(tmp_path):
    cells = [support.cell(seed=seed) for seed in range(figure.MOST_CELLS + 3)]
    workspace = Workspace(tmp_path)
    support.keep(workspace, cells, repeats=1)
    group = group_of(workspace)
    assert (len(group.marks), group.left_out) == (figure.MOST_CELLS, 3)
    assert traces.compute_max_points(1) == traces.MOST_POINTS
    assert traces.compute_max_points(10_000) == 100
