"""Every report shows what the instruments of a run (such as the profiler) found, and how much time they cost."""

import json

import pytest
import support_collect as support

from collect import figure, metric, summary
from collect.cli import main
from collect.figures.memory_over_time import MOST_POINTS, draw_categories_of_steps, draw_memory_timeline
from collect.findings import instrument_cost
from collect.reading import load
from collect.sources import memory
from shardlab.files import files
from shardlab.matrix.cell import Instruments, Profile
from shardlab.runs.run import make_run_id
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace


def test_the_report_says_how_much_the_profiler_slows_steps(tmp_path, capsys):
    """The report says that the steps which the profiler observed take three times as long as the other steps."""
    workspace = Workspace(tmp_path)
    plain, looked = support.cell(), support.cell("ddp", 2)
    support.keep(workspace, [plain, looked], repeats=1)
    support.completed(workspace, plain)
    folder = support.completed(workspace, looked)
    for rank in (0, 1):
        records = [json.loads(line) for line in folder.steps_file(rank).read_text().splitlines()]
        timed = [record for record in records if not record.get("warmup")]
        for record in timed:
            record["step_ms"] = 30.0 if record["step"] in (2, 3) else 10.0
        for record in timed[1:3]:
            record["watched"] = True
        folder.steps_file(rank).write_text("".join(json.dumps(record) + "\n" for record in records))
    result = json.loads(folder.result.read_text())
    result["instruments"] = {"profile": {"cost_s": 1.5, "watched_steps": [2, 3]}, "checkpoints": {"cost_s": 0.5}}
    folder.result.write_text(json.dumps(result))
    summarized = summary.summarize(load.load_matrix(workspace, None), "single")
    profile, checkpoints = summarized.instruments
    assert (profile.instrument, profile.cost_s, profile.watched_steps, profile.n) == ("profile", 1.5, 2, 1)
    assert profile.step_ratio == pytest.approx(3.0)
    assert (checkpoints.cost_s, checkpoints.watched_steps, checkpoints.step_ratio) == (0.5, 0, None)
    assert main(["summarize", "-v", "--workspace", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "instrument profile: 1.5 s between steps, 2 steps observed and not counted" in said
    assert "times as long as the others): ddp ×2" in said
    assert "instrument checkpoints: 0.50 s between steps: ddp ×2" in said
    assert "Cost of the instruments" in (workspace.report / "index.html").read_text()


def test_each_profiled_cell_is_named_also_behind_an_unprofiled_family(tmp_path):
    """The profiled cell of the second family (cells of equal work) is named, although the first family has no profiled cell."""
    workspace = Workspace(tmp_path)
    families = [
        [support.cell(), support.cell("ddp", 2)],
        [support.cell(seq_len=128), support.cell("ddp", 2, seq_len=128, instruments=Instruments(profile=Profile()))],
    ]
    cells = [cell for family in families for cell in family]
    support.keep(workspace, cells, repeats=1)
    for cell in cells:
        support.completed(workspace, cell)
    looked = RunDir(workspace.runs / make_run_id(cells[-1], 1, 1))
    result = json.loads(looked.result.read_text())
    result["instruments"] = {"profile": {"cost_s": 1.0, "watched_steps": [3, 4]}}
    looked.result.write_text(json.dumps(result))
    found = {cell.id: cell for cell in load.load_matrix(workspace, None).cells}
    loaded = [[found[cell.name()] for cell in family] for family in families]
    assert instrument_cost.describe_instrument_differences(loaded) == [f"{cells[-1].name()} (profile: steps 3 and 4)"]


def test_metrics_that_hold_all_steps_say_so():
    """The metrics in this list cover all steps. All other metrics of time exclude steps that an instrument slowed down."""
    whole = {
        "train_time_s", "epoch_time_s", "epoch_time_median_s", "time_to_accuracy_s", "cpu_pct", "cpu_peak_pct", "gpu_pct",
        "energy_j", "energy_per_unit_j", "energy_over_prediction", "rank_cpu_pct", "rank_read_bytes", "rank_written_bytes",
    }  # fmt: skip
    assert {one.name for one in metric.load_metrics() if one.of_all_steps} == whole


def test_memory_over_a_step_is_drawn_by_category_and_adds_up(tmp_path):
    workspace = Workspace(tmp_path)
    looked_into, not_looked_into = support.cell(), support.cell("ddp", 2)
    support.keep(workspace, [looked_into, not_looked_into], repeats=1)
    folder = support.completed(workspace, looked_into)
    support.completed(workspace, not_looked_into)
    moments = 2 * MOST_POINTS
    points = {"parameter": [4 * support.MIB] * moments, "activation": [support.MIB * (n % 100) for n in range(moments)]}
    files.make_folder(folder.memory_file(0).parent)
    files.write_json(folder.memory_file(0), {"schema": 1, "rank": 0, "step": 2, "t_ms": list(range(moments)), "points": points})
    found = load.load_matrix(workspace, None)
    (drawn,) = [draw_memory_timeline(group) for group in figure.group_by_workload(found, summary.summarize(found, "single"))]
    assert [trace["name"] for trace in drawn.data] == ["parameter", "activation"]
    assert max(drawn.data[0]["y"]) == 4.0
    assert max(drawn.data[1]["y"]) == 99.0  # the drawn line has fewer points than the data, and still has the peak
    assert len(drawn.data[1]["y"]) == MOST_POINTS


def test_memory_over_several_steps_has_a_panel_per_category_and_a_line_per_cell(tmp_path):
    workspace = Workspace(tmp_path)
    cells = [support.cell(), support.cell("ddp", 2), support.cell("fsdp2", 2)]
    support.keep(workspace, cells, repeats=1)
    for cell, steps in zip(cells, (3, 2, 1), strict=True):
        folder = support.completed(workspace, cell)
        points = {"parameter": [4 * support.MIB] * 3, "gradient": [0, steps * support.MIB, 0], "buffer": [0, 0, 0]}
        files.make_folder(folder.memory_file(0).parent)
        curves = {"schema": 1, "rank": 0, "step": 2, "steps": steps, "t_ms": [0, 500, 1500], "points": points}
        files.write_json(folder.memory_file(0), curves)
    found = load.load_matrix(workspace, None)
    (drawn,) = [
        draw_categories_of_steps(group) for group in figure.group_by_workload(found, summary.summarize(found, "single"))
    ]
    assert [note["text"] for note in drawn.layout["annotations"]] == ["Parameter (MiB)", "Gradient (MiB)"]
    of_gradient = {trace["name"]: (trace["x"], trace["y"]) for trace in drawn.data if trace["yaxis"] == "y2"}
    first, second = (label for label in of_gradient)
    assert of_gradient[first] == ([0, 0.5, 1.5], [0, 3, 0])
    assert of_gradient[second] == ([0, 0.5, 1.5], [0, 2, 0])
    assert drawn.caption.startswith("2 or 3 consecutive steps on rank 0")  # the cell that observed one step has no line


def test_a_category_that_only_one_cell_has_is_drawn_for_that_cell(tmp_path):
    workspace = Workspace(tmp_path)
    cells = [support.cell(), support.cell("ddp", 2)]
    support.keep(workspace, cells, repeats=1)
    for cell, category in zip(cells, ("activation", "gathered"), strict=True):
        folder = support.completed(workspace, cell)
        points = {"parameter": [support.MIB] * 3, category: [support.MIB] * 3}
        files.make_folder(folder.memory_file(0).parent)
        files.write_json(folder.memory_file(0), {"schema": 1, "rank": 0, "step": 2, "t_ms": [0, 1, 2], "points": points})
    found = load.load_matrix(workspace, None)
    (drawn,) = [draw_memory_timeline(group) for group in figure.group_by_workload(found, summary.summarize(found, "single"))]
    shown = {(trace["name"], trace["yaxis"]) for trace in drawn.data}
    assert {name for name, axis in shown if axis == "y"} == {"parameter", "activation"}
    assert {name for name, axis in shown if axis == "y2"} == {"parameter", "gathered"}
    assert [trace["name"] for trace in drawn.data if trace["showlegend"]] == ["parameter", "activation", "gathered"]


@pytest.mark.parametrize("damage", ['{"rank": 0', '{"rank": 0, "step": 2, "t_ms": [0.0], "points": {"parameter": [1, 2]}}'])
def test_damaged_curves_are_no_curves(tmp_path, damage):
    path = tmp_path / "rank-00000.json"
    path.write_text(damage)
    assert memory.read_memory_curves(path) is None
