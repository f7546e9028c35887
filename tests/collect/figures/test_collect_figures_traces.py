"""Figures of traces, of memory by category and of pipelines show the values of the metrics. Without data there is no figure."""

import json

import msgspec
import pytest
import support_collect as support
import support_report
import support_traces as traces

from collect import figure, summary
from collect.drawing import stacked_bars
from collect.figures import bubble, memory_over_time, memory_parts, operators
from collect.figures.step_parts import BREAKDOWN_FIGURE, OVERLAP_FIGURE, draw_collectives
from collect.metrics.memory_categories import DESCRIPTION_BY_CATEGORY
from collect.reading import load
from collect.report import page
from shardlab.workspace.workspace import Workspace

MIB = support.MIB
OF_TRACES = {
    "breakdown": BREAKDOWN_FIGURE.draw,
    "overlap": OVERLAP_FIGURE.draw,
    "collectives": draw_collectives,
    "operator_differences": operators.draw_differences,
}
OURS = OF_TRACES | {
    "bubble_pct": bubble.draw,
    "memory_categories": memory_parts.draw_categories,
    "sharding": memory_parts.draw_sharding,
}
LOOKED = {
    "single": {"parameter": 40 * MIB, "gradient": 40 * MIB, "optimizer_state": 80 * MIB, "activation": 30 * MIB},
    "zero3": {"parameter": 20 * MIB, "gradient": 20 * MIB, "optimizer_state": 40 * MIB, "master_parameter": 20 * MIB},
}
ESTIMATES = {
    "single": {"parameter": 40 * MIB, "gradient": 40 * MIB, "optimizer_state": 80 * MIB},
    "zero3": {"parameter": 20 * MIB, "gradient": 20 * MIB, "optimizer_state": 40 * MIB},
}


def drawn(workspace, draw, baseline="single"):
    loaded = load.load_matrix(workspace, None)
    (group,) = figure.group_by_workload(loaded, summary.summarize(loaded, baseline))
    found = draw(group)
    assert found is None or {*found.cells} & {mark.row.id for mark in group.marks}, "a figure names the cells that it shows"
    return found, group


def profiled(workspace, cell, events, *, repeats=2, ranks=1):
    """Make a completed cell whose repeats have traces.

    events: a function of (generated events of a rank, number of the repeat) that returns the events to write to the trace.
    """
    for repeat in range(1, repeats + 1):
        folder = support.completed(workspace, cell, repeat)
        (folder.path / "trace").mkdir()
        for number in range(ranks):
            rank = traces.Rank(number, seed=repeat)
            rank.events = events(rank.events, repeat)
            rank.write(folder.path / "trace", gz=True)


def alone(events, repeat):
    """The events without those of collectives and their launches."""
    collectives = {event["args"]["correlation"] for event in events if event["name"].startswith("nccl")}
    return [
        event
        for event in events
        if event.get("cat") not in ("kernel", "cuda_runtime") or event["args"]["correlation"] not in collectives
    ]


def without_steps(events, repeat):
    return [event for event in events if not event["name"].startswith("ProfilerStep")]


def together(events, repeat):
    return events


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    """A workspace with two cells that have traces of GPUs, and one cell without traces."""
    workspace = Workspace(tmp_path_factory.mktemp("gpu"))
    single, ddp, plain = support.cell(), support.cell("ddp", 2), support.cell("fsdp2", 2)
    support.keep(workspace, [single, ddp, plain], 2)
    profiled(workspace, single, alone)
    profiled(workspace, ddp, together, ranks=2)
    support.completed(workspace, plain)
    return workspace


def part(found, name, axis="x"):
    """The values of one part of a figure's stacked bars. name: the part. axis: the x axis of the bars."""
    (values,) = [trace["x"] for trace in found.data if trace.get("name") == name and trace.get("xaxis") == axis]
    return values


def test_the_parts_of_a_step_add_up_to_its_span(gpu):
    found, group = drawn(gpu, BREAKDOWN_FIGURE.draw)
    parts = [part(found, name) for name in ("compute", "exposed communication", "exposed memory operations", "idle")]
    spans = []
    for mark in group.marks[:2]:
        runs = [run.breakdowns for run in mark.cell.completed_runs]
        spans.append(sum(sum(one.span_ns / one.steps for one in run) / len(run) for run in runs) / len(runs) / 1e6)
    assert parts[1][0] == 0
    assert all(value > 0 for values in parts for value in values[1:])
    assert [sum(values) for values in zip(*parts, strict=True)] == pytest.approx(spans, rel=1e-12)
    for mark, compute, idle in zip(group.marks, parts[0], parts[3], strict=False):
        assert (compute, idle) == (mark.row.metrics["compute_ms"].value, mark.row.metrics["idle_ms"].value)


def test_the_drawn_parts_equal_the_generated_parts_of_a_trace(tmp_path):
    """The bars equal the times that support_traces computes from the generated events."""
    workspace = Workspace(tmp_path)
    support.keep(workspace, [support.cell()], 1)
    profiled(workspace, support.cell(), together, repeats=1)
    rank = traces.Rank(0, seed=1)
    truth = traces.truth(rank.events)
    found, _ = drawn(workspace, BREAKDOWN_FIGURE.draw)
    steps_ms = 4e6  # converts ns of a trace to ms per step: 4 steps x 1e6 ns/ms
    exposed = truth["communication_ns"] - truth["overlap_ns"]
    assert part(found, "compute") == pytest.approx([truth["compute_ns"] / steps_ms])
    assert part(found, "exposed communication") == pytest.approx([exposed / steps_ms])
    assert part(found, "exposed memory operations") == pytest.approx([(truth["non_compute_ns"] - exposed) / steps_ms])
    assert part(found, "idle") == pytest.approx([truth["idle_ns"] / steps_ms])


def test_a_figure_lists_only_cells_with_its_values(gpu):
    """A cell is listed in a figure only if its traces have the values that the figure shows."""
    labels = [note["text"] for note in drawn(gpu, BREAKDOWN_FIGURE.draw)[0].layout["annotations"]]
    assert labels == ["single ×1", "ddp ×2"]
    assert [note["text"] for note in drawn(gpu, OVERLAP_FIGURE.draw)[0].layout["annotations"]] == ["ddp ×2"]
    assert [note["text"] for note in drawn(gpu, draw_collectives)[0].layout["annotations"]] == ["ddp ×2"]


def test_hidden_and_exposed_are_all_of_the_communication(gpu):
    found, group = drawn(gpu, OVERLAP_FIGURE.draw)
    metrics = group.marks[1].row.metrics
    (hidden,), (exposed,) = part(found, "hidden behind compute"), part(found, "exposed")
    assert hidden > 0 < exposed
    assert hidden + exposed == pytest.approx(metrics["communication_ms"].value, rel=1e-12)
    (text,) = found.data[-1]["text"]
    assert float(text.split("%")[0]) == pytest.approx(metrics["overlap_pct"].value, rel=1e-2)


def test_collectives_by_kind_are_the_metrics(gpu):
    """The bars of all kinds of collectives add up to the metrics collective_count and collective_ms."""
    found, group = drawn(gpu, draw_collectives)
    metrics = group.marks[1].row.metrics
    for axis, name in (("x", "collective_count"), ("x2", "collective_ms")):
        (all_reduce,), (all_gather,) = part(found, "all_reduce", axis), part(found, "all_gather", axis)
        assert all_reduce > 0 < all_gather
        assert all_reduce + all_gather == pytest.approx(metrics[name].value, rel=1e-12)
    assert [trace["showlegend"] for trace in found.data if trace.get("name") == "all_reduce"] == [True, False]


def test_operators_are_held_against_the_baseline(gpu):
    found, group = drawn(gpu, operators.draw_differences)
    (bars,) = found.data
    names = [note["text"] for note in found.layout["annotations"]]
    assert bars["name"] == "ddp ×2"
    assert {"ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclDevKernel_AllGather_RING_LL"} <= set(names)
    assert [abs(value) for value in bars["x"]] == sorted((abs(value) for value in bars["x"]), reverse=True)
    uses = operators.get_uses(group.marks[1])
    assert bars["x"][names.index("ncclDevKernel_AllGather_RING_LL")] == pytest.approx(uses[traces.ALL_GATHER].total_ms)
    assert "single ×1: not called" in bars["customdata"][names.index("ncclDevKernel_AllGather_RING_LL")]
    low, high = found.layout["xaxis"]["range"]
    assert low < min(bars["x"])
    assert max(bars["x"]) < high


def test_the_operators_are_the_ten_that_differ_most():
    spread = {f"kernel {number}": operators.OperatorUse(1, number) for number in range(30)}
    there = {"kernel 29": operators.OperatorUse(3, 29), "gone": operators.OperatorUse(1, 100)}
    assert operators.find_most_different_names([operators.BaselinePair(None, spread, None, there)]) == [
        "gone",
        *(f"kernel {number}" for number in range(28, 19, -1)),
    ]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (traces.ALL_REDUCE, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 4>(float*)", "CatArrayBatchedCopy"),
        (traces.COPY, traces.COPY),
        ("aten::add_", "aten::add_"),
        ("x" * 30 + "y" * 30, "x" * 29 + "…" + "y" * 14),
    ],
)
def test_kernels_are_named_shortly(name, short):
    assert operators.shorten_names([name, "another"]) == [short, "another"]
    assert len(short) <= operators.NAME_LENGTH


def test_kernels_of_one_name_are_told_apart_by_their_arguments():
    kernel = "void at::native::vectorized_elementwise_kernel<4, at::native::{}<float>, std::array<char*, 3ul> >(int)"
    names = operators.shorten_names([kernel.format("FillFunctor"), kernel.format("CUDAFunctor_add"), "aten::mm"])
    assert names == ["vectorized_el…kernel<4, FillFunctor<float>,…", "vectorized_el…kernel<4, CUDAFunctor_add<flo…", "aten::mm"]
    assert all(len(name) <= operators.NAME_LENGTH for name in names)


def looked_into(workspace, strategies=LOOKED):
    cells = [support.cell(strategy, 1 if strategy == "single" else 2) for strategy in strategies]
    support.keep(workspace, [*cells, support.cell("ddp", 2)], 2)
    for cell in cells:
        peak = dict.fromkeys(DESCRIPTION_BY_CATEGORY, 0) | LOOKED[cell.strategy]
        for repeat in (1, 2):
            peak["temporary"] = repeat * 10 * MIB
            memory = {
                "cost_s": 0.1,
                "peak_bytes": dict(peak),
                "largest_bytes": dict(peak),
                "estimate_bytes": ESTIMATES[cell.strategy],
            }
            support.completed(workspace, cell, repeat, found={"instruments": {"memory": memory}})


def test_memory_is_what_the_instrument_found_at_the_peak(tmp_path):
    looked_into(Workspace(tmp_path))
    found, group = drawn(Workspace(tmp_path), memory_parts.draw_categories)
    assert part(found, "parameter") == [40, 20]
    assert part(found, "temporary") == [15, 15]  # the two repeats have 10 and 20 MiB, so the mean is 15 MiB
    assert [entry["name"] for entry in found.data if entry.get("name") == "buffer"] == []
    assert part(found, "estimate") == [160, 80]
    assert part(found, "estimate")[0] == group.marks[0].row.metrics["estimated_memory_bytes"].value / MIB
    assert found.data[-1]["text"] == ["  205", "  115"]
    assert found.layout["xaxis"]["title"]["text"] == "MiB"


def test_the_measured_memory_of_each_category_is_drawn_beside_the_estimate(tmp_path):
    """The measured memory of a rank in each category is drawn beside the estimate."""
    looked_into(Workspace(tmp_path))
    found, group = drawn(Workspace(tmp_path), memory_parts.draw_sharding)
    assert (part(found, "parameter", "x"), part(found, "estimate", "x")) == ([40, 20], [40, 20])
    assert (part(found, "gradient", "x2"), part(found, "estimate", "x2")) == ([40, 20], [40, 20])
    assert (part(found, "optimizer state", "x3"), part(found, "estimate", "x3")) == ([80, 40], [80, 40])
    assert part(found, "master copy", "x3") == [0, 20]
    assert part(found, "parameter")[1] == group.marks[1].row.metrics["memory_parameter_bytes"].value / MIB


def test_every_category_has_its_colour_in_both_figures_of_memory():
    assert set(DESCRIPTION_BY_CATEGORY) < set(memory_over_time.CATEGORIES)
    assert len(set(memory_over_time.CATEGORIES.values())) == len(memory_over_time.CATEGORIES)


def test_a_bubble_is_drawn_over_its_micro_batches_beside_theory(tmp_path):
    support.complete_pipelines(Workspace(tmp_path))
    found, group = drawn(Workspace(tmp_path), bubble.draw)
    curve, measured = found.data
    assert (curve["name"], measured["name"]) == ("theory, P = 2", "pp-gpipe, P = 2")
    assert measured["x"] == [4, 16]
    assert measured["y"] == pytest.approx([20, 20])
    assert (measured["marker"]["color"], curve["line"]["color"]) == (group.marks[1].look.colour, figure.INK)
    assert curve["x"][0] < 4
    assert curve["x"][-1] > 16
    for mark in group.marks[1:]:
        theory = mark.row.metrics["bubble_theory_pct"].value
        assert bubble.compute_theoretical_bubble_pct(2, mark.cell.cell.gradient_accumulation_steps) == theory
    assert curve["y"] == pytest.approx([100 / (count + 1) for count in curve["x"]])
    assert "micro-batches" in found.layout["xaxis"]["title"]["text"]
    assert "%" in found.layout["yaxis"]["title"]["text"]


@pytest.mark.parametrize("name", OURS)
def test_no_figure_is_drawn_without_traces(name, tmp_path):
    """Without traces, none of the figures in OURS is drawn."""
    workspace = Workspace(tmp_path)
    support.keep(workspace, [support.cell(), support.cell("ddp", 2)], 1)
    support.completed(workspace, support.cell())
    assert drawn(workspace, OURS[name])[0] is None
    assert OURS[name] in support_report.page_figures()


@pytest.mark.parametrize("name", OF_TRACES)
def test_a_trace_without_steps_is_in_no_figure(name, tmp_path):
    workspace = Workspace(tmp_path)
    support.keep(workspace, [support.cell(), support.cell("ddp", 2)], 1)
    profiled(workspace, support.cell(), alone, repeats=1)
    profiled(workspace, support.cell("ddp", 2), without_steps, repeats=1)
    found, _ = drawn(workspace, OF_TRACES[name])
    if name == "breakdown":
        assert [note["text"] for note in found.layout["annotations"]] == ["single ×1"]
    else:
        assert found is None


def many(group, count):
    """A copy of a group of cells (one figure draws a group) with `count` further, renamed copies of each cell."""
    marks = [msgspec.structs.replace(mark, label=f"{mark.label} {number}") for number in range(count) for mark in group.marks]
    return msgspec.structs.replace(group, marks=[*group.marks, *marks])


@pytest.mark.parametrize("name", OF_TRACES)
def test_figures_of_many_profiled_cells_are_bounded_and_say_so(gpu, name):
    _, group = drawn(gpu, OF_TRACES[name])
    found = OF_TRACES[name](many(group, 200))
    assert len(found.layout["annotations"]) <= stacked_bars.MOST_BARS
    assert found.height_px < 4000
    assert len(json.dumps(found.data)) < 100_000
    assert found.caption.endswith("more cells are not drawn.")


def test_names_of_kernels_are_text_and_never_markup(tmp_path):
    workspace = Workspace(tmp_path)
    support.keep(workspace, [support.cell(), support.cell("ddp", 2)], 1)
    profiled(workspace, support.cell(), alone, repeats=1)

    def hostile(events, _):
        return [event | {"name": "<a href='x'>&</a>"} if event["name"] == traces.ALL_GATHER else event for event in events]

    profiled(workspace, support.cell("ddp", 2), hostile, repeats=1)
    found, _ = drawn(workspace, operators.draw_differences)
    assert "<a" not in json.dumps([found.data, found.layout])


def test_the_page_holds_every_figure_of_traces(gpu):
    loaded = load.load_matrix(gpu, None)
    html = page.draw_page(loaded, summary.summarize(loaded, "single"), gpu.report, gpu.runs)
    for title in ("Where a step", "Overlap", "Collectives", "Operators against the baseline"):
        assert f">{title}" in html
