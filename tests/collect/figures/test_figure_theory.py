"""The figure of the memory and the sent bytes of strategies in theory shows the predictions of the runs."""

import msgspec
import support_collect as support
import support_report

from collect import figure, summary
from collect.figures import head_to_head
from collect.figures.memory_parts import BY_THEORY_KIND, draw_theory, find_tensor_memory
from collect.reading import load
from collect.report import report_start
from shardlab.runs.prediction import PredictedExchange, Prediction, find_prediction_path, make_exact_range
from shardlab.runs.record import SameWork
from shardlab.runs.run import make_run_id
from shardlab.workspace.workspace import Workspace

GIB = 2**30


def test_the_bars_are_the_predicted_memory_and_the_predicted_bytes(tmp_path):
    workspace = Workspace(tmp_path)
    single, ddp, fsdp2, unknown = support.cell(), support.cell("ddp", 2), support.cell("fsdp2", 2), support.cell("zero3", 2)
    support.keep(workspace, [single, ddp, fsdp2, unknown], repeats=1)
    for what in (single, ddp, fsdp2, unknown):
        support.completed(workspace, what)
    gathers = [PredictedExchange("all_gather", GIB, 36, 2), PredictedExchange("all_gather", GIB, 36, 2)]
    scatter = PredictedExchange("reduce_scatter", 0.5 * GIB, 37, 2)
    for what, parameter, exchanges in (
        (single, 4, ()),
        (ddp, 4, (PredictedExchange("all_reduce", 2 * GIB, 3, 2),)),
        (fsdp2, 2, (*gathers, scatter)),
    ):
        memory = {
            "parameter": make_exact_range(parameter * GIB),
            "activation": make_exact_range(9 * GIB),
            "cuda_context": make_exact_range(GIB),
        }
        predicted = Prediction(memory_by_category=memory, exchanges=exchanges)
        find_prediction_path(workspace.find_run_dir(make_run_id(what, 1)).path).write_bytes(msgspec.json.encode(predicted))
    loaded = load.load_matrix(workspace, None)
    (group,) = figure.group_by_workload(loaded, summary.summarize(loaded, "single"))
    drawn = draw_theory(group)
    bars = {
        bar["name"]: dict(zip((entry[0] for entry in bar["customdata"]), bar["x"], strict=True))
        for bar in drawn.data
        if bar["type"] == "bar"
    }
    named = {mark.cell.cell.strategy: mark.label for mark in group.marks}
    assert bars == {
        "parameter": {named["single"]: 4, named["ddp"]: 4, named["fsdp2"]: 2},
        "all-reduce": {named["ddp"]: 2},
        "all-gather": {named["fsdp2"]: 2},
        "reduce-scatter": {named["fsdp2"]: 0.5},
    }
    ends = [text.strip() for entry in drawn.data if entry.get("mode") == "text" for text in entry["text"]]
    assert ends == ["4.00", "4.00", "2.00", "nothing", "2.00", "2.50"]
    assert draw_theory in support_report.page_figures()


def test_cells_are_chosen_among_those_with_a_prediction(tmp_path):
    """Cells with the most ranks are drawn first; here they have no prediction, because they have not run."""
    workspace = Workspace(tmp_path)
    cells = [
        support.cell(name, ranks, global_batch_size=batch)
        for name in ("ddp", "fsdp2", "zero3")
        for ranks in (2, 4)
        for batch in (8, 16, 32)
    ]
    assert len(cells) > figure.MOST_SHOWN
    support.keep(workspace, cells, repeats=1)
    predicted = Prediction(memory_by_category={"parameter": make_exact_range(GIB)})
    for what in cells:
        support.completed(workspace, what)
        if what.gpus == 2:
            find_prediction_path(workspace.find_run_dir(make_run_id(what, 1)).path).write_bytes(msgspec.json.encode(predicted))
    loaded = load.load_matrix(workspace, None)
    (group,) = figure.group_by_workload(loaded, summary.summarize(loaded, "single"))
    assert draw_theory(group) is not None


def test_without_predictions_there_is_no_figure(tmp_path):
    loaded = load.load_matrix(support.matrix(tmp_path), None)
    (group,) = figure.group_by_workload(loaded, summary.summarize(loaded, "single"))
    assert draw_theory(group) is None


def test_a_panel_without_values_is_left_out(tmp_path):
    """A browser cannot draw an x axis without a range."""
    workspace, what = Workspace(tmp_path), support.cell("ddp", 2)
    support.keep(workspace, [what], repeats=1)
    support.completed(workspace, what)
    predicted = Prediction(memory_by_category={"parameter": make_exact_range(GIB)})
    find_prediction_path(workspace.find_run_dir(make_run_id(what, 1)).path).write_bytes(msgspec.json.encode(predicted))
    loaded = load.load_matrix(workspace, None)
    (group,) = figure.group_by_workload(loaded, summary.summarize(loaded, "single"))
    drawn = draw_theory(group)
    assert [entry["name"] for entry in drawn.data if entry["type"] == "bar"] == ["parameter"]
    assert "xaxis2" not in drawn.layout


def test_on_a_cpu_the_head_to_head_and_the_choice_judge_tensors_and_not_processes(tmp_path):
    """The resident sets are nearly equal: they are mostly the interpreter. By theory, fsdp2 keeps half of ddp's bytes."""
    workspace = Workspace(tmp_path)
    cells = {what.strategy: what for what in (support.cell("ddp", 2), support.cell("fsdp2", 2))}
    support.keep(workspace, list(cells.values()), repeats=1)
    for what in cells.values():
        support.completed(workspace, what, found={"same_work": SameWork(verdict="proven", why="against one process")})

    def judge(**kept_gib):
        for strategy, gib in kept_gib.items():
            memory = {"parameter": make_exact_range(gib * GIB)}
            predicted = Prediction(
                memory_by_category=memory, tensor_bytes=make_exact_range(gib * GIB), formula_tensor_bytes=gib * GIB
            )
            path = workspace.find_run_dir(make_run_id(cells[strategy], 1)).path
            find_prediction_path(path).write_bytes(msgspec.json.encode(predicted))
        loaded = load.load_matrix(workspace, None)
        summarized = summary.summarize(loaded, "ddp")
        (group,) = figure.group_by_workload(loaded, summarized)
        tensors = {cell.id: memory for cell in loaded.cells if (memory := find_tensor_memory(cell))}
        (choice,) = report_start.list_best_choices(summarized, tensors)
        return head_to_head.draw(group), dict(choice.best)["Least memory per rank"]

    drawn, said = judge(ddp=4)  # fsdp2 has no prediction, so only the processes can be compared
    assert "Memory: resident set of the process." in drawn.caption
    assert said.remark != BY_THEORY_KIND
    drawn, said = judge(ddp=4, fsdp2=2)
    assert {trace["name"]: trace["x"] for trace in drawn.data if trace["name"] != "front"} == {"ddp": [4], "fsdp2": [2]}
    assert f"Memory: {BY_THEORY_KIND}." in drawn.caption
    assert drawn.layout["xaxis"]["rangemode"] == "tozero"
    assert ([link.text for link in said.names], said.value, said.is_sure) == (["fsdp2"], "2.00 GiB", False)
    assert (said.remark, said.margin) == (BY_THEORY_KIND, "50\u00a0% less than ddp")
