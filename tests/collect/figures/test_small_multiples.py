"""A figure with too many lines or rows for one plot becomes small multiples, with all values in the panel of their strategy."""

import itertools

import pytest
import support_browser
import support_collect as support

from collect import figure
from collect.cli import main
from collect.drawing import axes, panel_rows, small_multiples, stacked_bars
from collect.figures import cell_rows, scaling, training
from collect.report import page
from shardlab.workspace.workspace import Workspace
from tests.collect.figures.test_over_time import group_of

STRATEGIES = ["single", "ddp", "fsdp2", "fsdp2-zero2", "zero0", "zero1", "zero2", "zero3", "fsdp1-full-shard", "tp"]
BATCHES = [8, 16, 24, 32, 40, 48, 56, 64]
# JavaScript: pairs of texts of a figure that lie on each other, and texts that reach beyond the figure.
COLLIDING = """(figure) => {
  const texts = [...figure.querySelectorAll('.annotation-text, .xtick text, .ytick text, .legendtext')];
  const boxes = texts.map((one) => [one.textContent, one.getBoundingClientRect()]).filter(([text, box]) => text && box.width);
  const whole = figure.getBoundingClientRect();
  const beyond = boxes.filter(([, box]) => box.left < whole.left - 2 || box.right > whole.right + 2).map(([text]) => text);
  const meeting = boxes.flatMap(([text, one], place) => boxes.slice(place + 1).filter(([, other]) =>
    Math.min(one.right, other.right) - Math.max(one.left, other.left) > 2 &&
    Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 3).map(([other]) => `${text} on ${other}`));
  return [...beyond, ...meeting];
}"""


def cell(strategy, batch):
    return support.cell(strategy, global_batch_size=batch, micro_batch_size=batch, steps=3)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A workspace with ten strategies and eight batch sizes. The largest batch of ddp runs out of memory."""
    workspace = Workspace(tmp_path_factory.mktemp("crowded"))
    cells = [cell(strategy, batch) for strategy in STRATEGIES for batch in BATCHES]
    support.keep(workspace, cells, repeats=1)
    for what in cells:
        if (what.strategy, what.global_batch_size) == ("ddp", 64):
            support.failed(workspace, what, 1, "CUDA out of memory")
        else:
            support.completed(workspace, what, gpu=True, loss_shift=what.global_batch_size / 100)
    return workspace


@pytest.fixture(scope="module")
def group(crowded):
    return group_of(crowded)


def panels(drawn):
    """The title of the panel of each trace, by the axes that the trace is drawn on."""
    titles = [one["text"] for one in drawn.layout["annotations"] if one["text"] in {*STRATEGIES, "ranks 1", "ranks 2"}]
    axes = list(dict.fromkeys((trace["xaxis"], trace["yaxis"]) for trace in drawn.data))
    return {axis: titles[place * len(titles) // len(axes)] for place, axis in enumerate(axes)}


def coloured(drawn):
    """{(title of a panel, name of a line): line} without the grey lines."""
    of = panels(drawn)
    return {(of[line["xaxis"], line["yaxis"]], line["name"]): line for line in drawn.data if line["name"] != "other panels"}


def test_each_strategy_has_a_panel_with_its_own_lines_and_all_others_in_grey(group):
    drawn = training.draw_loss(group)
    lines = coloured(drawn)
    names = [f"batch {batch}" for batch in BATCHES]
    missing = {("ddp", "batch 64")}
    assert lines.keys() == set(itertools.product(STRATEGIES, names)) - missing
    of_cell = {(mark.cell.cell.strategy, f"batch {mark.cell.cell.global_batch_size}"): mark.cell for mark in group.marks}
    for place, line in lines.items():
        assert line["y"] == of_cell[place].completed_runs[0].world_steps["loss"].to_list()
    grey = [line for line in drawn.data if line["name"] == "other panels"]
    assert len(grey) == len(STRATEGIES)
    assert [line["y"].count(None) for line in grey] == [71, 72] + [71] * 8  # each line ends in a gap, ddp has one line less
    assert not any(line.get("visible") == "legendonly" for line in drawn.data)


def test_a_size_looks_the_same_in_all_panels_and_is_once_in_the_legend(group):
    drawn = training.draw_loss(group)
    looks = {}
    for (_, name), line in coloured(drawn).items():
        looks.setdefault(name, set()).add((line["line"]["color"], line["line"]["dash"]))
    assert all(len(found) == 1 for found in looks.values())
    assert len(set.union(*looks.values())) == len(BATCHES)
    assert [line["name"] for line in drawn.data if line["showlegend"]] == [
        "other panels",
        *(f"batch {size}" for size in BATCHES),
    ]


def test_all_panels_have_the_same_axes_and_only_the_outer_ones_have_tick_labels(group):
    shape = training.draw_loss(group).layout
    for kind, labelled in (("xaxis", 2), ("yaxis", 5)):
        axes = [value for name, value in shape.items() if name.startswith(kind)]
        assert len(axes) == len(STRATEGIES)
        assert [one.get("matches") for one in axes] == [None] + [kind[0]] * 9
        assert sum(one["showticklabels"] for one in axes) == labelled


@pytest.mark.parametrize(
    ("draw", "metric", "size"),
    [(cell_rows.draw_throughput, "throughput_per_s", 1), (cell_rows.draw_peak_memory, "peak_memory_bytes", 2**30)],
)
def test_rows_are_in_the_panel_of_their_strategy_with_their_values(group, draw, metric, size):
    drawn = draw(group)
    of = panels(drawn)
    at = {}
    for trace in drawn.data:
        if trace.get("mode") != "text":
            at |= {(of[trace["xaxis"], trace["yaxis"]], y): x for x, y in zip(trace["x"], trace["y"], strict=True)}
    expected = {
        (mark.cell.cell.strategy, f"batch {mark.cell.cell.global_batch_size}"): mark.row.metrics[metric].value / size
        for mark in group.marks
        if metric in mark.row.metrics
    }
    assert at == pytest.approx(expected)
    (state,) = [trace for trace in drawn.data if trace.get("mode") == "text" and trace["text"]]
    assert (state["y"], state["text"]) == (["batch 64"], ["  oom"])
    assert of[state["xaxis"], state["yaxis"]] == "ddp"
    assert drawn.height_px < axes.sum_rows_px(group)


def test_a_row_is_named_by_its_whole_cell_where_the_reader_points(group):
    trace = next(trace for trace in cell_rows.draw_throughput(group).data if trace.get("hovertemplate", "").startswith("%{x"))
    assert trace["hovertext"] == ["single ×1"]
    assert trace["hovertemplate"].endswith("<extra>%{hovertext}</extra>")


def test_up_to_the_limit_lines_and_rows_stay_in_one_plot(group):
    few = group.marks[: figure.MOST_SHOWN]
    assert small_multiples.divide_cells(few) == {}
    more = small_multiples.divide_cells(group.marks[: figure.MOST_SHOWN + 1])
    assert {one.panel for one in more.values()} == {"single", "ddp"}
    one_plot = figure.Figure("a", "", "", 100, [], axes.make_layout({}, {}))
    assert panel_rows.split_rows(one_plot, group.marks[: figure.MOST_ROWS]) is one_plot
    assert small_multiples.split_lines(one_plot, {}) is one_plot


def test_cells_of_one_strategy_have_panels_by_their_ranks(tmp_path):
    workspace = Workspace(tmp_path)
    cells = [
        support.cell("ddp", gpus, global_batch_size=2 * size, micro_batch_size=2 * size // gpus)
        for gpus in (1, 2)
        for size in range(1, 9)
    ]
    support.keep(workspace, cells, repeats=1)
    found = small_multiples.divide_cells(group_of(workspace).marks)
    assert {(one.panel, one.key_name) for one in found.values()} == {
        ("ranks 1", "number of ranks"),
        ("ranks 2", "number of ranks"),
    }
    assert [one.variant for one in found.values()] == [f"batch {2 * size}" for size in range(1, 9)] * 2


def test_cells_that_no_key_divides_stay_in_one_plot(tmp_path):
    workspace = Workspace(tmp_path)
    support.keep(workspace, [support.cell(seed=seed) for seed in range(20)], repeats=1)
    assert small_multiples.divide_cells(group_of(workspace).marks) == {}


def test_lines_through_cells_are_divided_too(tmp_path):
    workspace = Workspace(tmp_path)
    cells = [support.cell(strategy, gpus, global_batch_size=batch, micro_batch_size=batch // gpus, steps=2)
             for strategy in STRATEGIES[:7] for gpus in (1, 2) for batch in (8, 64)]  # fmt: skip
    support.keep(workspace, cells, repeats=1)
    for what in cells:
        support.completed(workspace, what, gpu=True)
    marks = group_of(workspace)
    for drawn, plots, names in (
        (scaling.draw_batch_sizes(marks), 2, {"×1", "×2"}),
        (scaling.draw_scaling(marks), 1, {"batch 8", "batch 64"}),
    ):
        assert {name for _, name in coloured(drawn)} - {"ideal", "batch 8 per rank", "batch 32 per rank"} >= names
        assert len([name for name in drawn.layout if name.startswith("yaxis")]) == 7 * plots
        assert all(1 <= sum(name == line for _, line in coloured(drawn)) <= 7 for name in names)


def test_bars_are_divided_with_all_their_parts(group):
    values = [float(place + 1) for place in range(len(group.marks))]
    bars = [{"a": value, "b": 2 * value} for value in values]
    panel = stacked_bars.BarPanel("ms", "ms", bars, {"a": "red", "b": "blue"}, [f"{3 * value:.0f}" for value in values])
    for count in (1, 2):
        drawn = stacked_bars.draw_bars("bars", "Bars", "", group, [panel] * count)
        of = panels(drawn)
        found = {}
        for trace in drawn.data:
            if trace["type"] == "bar" and trace["name"] == "b":
                found |= {(of[trace["xaxis"], trace["yaxis"]], y): x for x, y in zip(trace["x"], trace["y"], strict=True)}
        places = [(mark.cell.cell.strategy, f"batch {mark.cell.cell.global_batch_size}") for mark in group.marks]
        assert found == dict(zip(places, (2 * value for value in values), strict=True))
        assert [trace["name"] for trace in drawn.data if trace["showlegend"]] == ["a", "b"]
        assert drawn.layout["xaxis"]["range"][1] > 3 * max(values)


def test_ticks_that_would_lie_on_each_other_are_left_out():
    log = axes.make_axis("", type="log", tickvals=[1, 2, 3, 4, 8, 16, 32, 64], ticktext=list("abcdefgh"))
    kept = axes.thin_ticks(log, 4)
    assert kept["tickvals"] == [1, 3, 16, 64]
    assert kept["ticktext"] == ["1", "3", "16", "64"]
    assert axes.thin_ticks(axes.make_axis("")) == axes.make_axis("")


@support_browser.needed
def test_texts_of_a_divided_figure_do_not_overlap_on_a_desktop_or_a_phone(crowded):
    assert main(["summarize", "--workspace", str(crowded.path)]) == 0
    with support_browser.browser() as started:
        for width in (support_browser.WIDTH, support_browser.PHONE):
            with support_browser.opened(started, crowded.report / "index.html", width) as found:
                assert found.complaints == []
                found.fold(False)
                assert found.found(support_browser.UNDRAWN) == []
                assert found.found(support_browser.OVERFLOW) <= width
                for name in ("loss", "batch-scaling", "step-time", "peak-memory-bytes", "throughput-per-s"):
                    one = found.page.locator(f"#figure-{name}")
                    assert one.evaluate(COLLIDING) == [], (name, width)


def test_the_picture_of_a_divided_figure_has_room_for_its_legend(group, crowded):
    drawn = training.draw_loss(group)
    added = figure.make_image_layout(drawn, "Loss", False)
    assert added["height"] > drawn.height_px + figure.TITLE_PX
    assert "xaxis10" in (drawn.layout | added)
    assert "loss" not in page.WIDE_FIGURES
