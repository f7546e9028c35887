"""Figures, metrics and tables that explain the duration of a step, made from generated traces whose true values are known."""

import json

import pytest
import support_collect
import support_ranks as support
import support_traces

from collect import figure, summary
from collect.cli import main
from collect.figures import rates, step_parts, why_slower
from collect.findings import trace_answers
from collect.metric import load_metrics
from collect.reading import load
from shardlab.workspace.workspace import Workspace


def profile(workspace, cell, size, seeds):
    """Make a completed cell whose repeats have traces of all ranks.

    size: the number of ranks. seeds: one seed for each repeat, from which its traces are generated.
    """
    for repeat, seed in enumerate(seeds, 1):
        support.write_traces(support_collect.completed(workspace, cell, repeat), support.run(seed, size=size))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A workspace with two cells that have traces of all ranks, and a third cell without traces."""
    made = Workspace(tmp_path_factory.mktemp("answers"))
    cells = [support_collect.cell(), support_collect.cell("ddp", 2), support_collect.cell("fsdp2", 2)]
    support_collect.keep(made, cells, 2)
    profile(made, cells[0], 1, (1, 2))
    profile(made, cells[1], 2, (5, 6))
    support_collect.completed(made, cells[2])
    return made


@pytest.fixture(scope="module")
def results(workspace):
    loaded = load.load_matrix(workspace, None)
    told = summary.summarize(loaded, "single")
    (group,) = figure.group_by_workload(loaded, told)
    return loaded, told, group


def part(found, name):
    return next(trace["x"] for trace in found.data if trace.get("name") == name)


def values(run):
    """Maps the name of each metric to its value for a run.

    Metrics with the argument `of` are computed for all_reduce.
    """
    found = {metric.name: metric.of_run(run) for metric in load_metrics() if metric.of_run}
    return found | {
        metric.name: metric.of_run_at(run, "all_reduce")
        for metric in load_metrics()
        if metric.argument == "of" and metric.of_run_at
    }


def test_trace_metrics_equal_the_values_of_the_generator(results):
    """The metrics equal the values with which support_ranks generated the traces."""
    loaded, _, _ = results
    (run, _) = loaded.cells[1].completed_runs
    ranks = support.run(5, size=2)
    found = values(run)
    calls = [call for rank in ranks for call in rank.calls if call[0] == "all_reduce"]
    assert calls
    time = sum(call[3] - call[2] - call[5] for call in calls)
    assert found["algorithm_bandwidth_gb_per_s"].value == pytest.approx(sum(call[4] for call in calls) / time)
    # Bus bandwidth is algorithm bandwidth times 2 (n - 1) / n. For n = 2 ranks both are equal.
    assert found["bus_bandwidth_gb_per_s"].value == pytest.approx(sum(call[4] for call in calls) / time)
    waits = [call[5] for rank in ranks for call in rank.calls if call[0] != "broadcast"]
    pairs = [max(pair) for pair in zip(waits[: len(waits) // 2], waits[len(waits) // 2 :], strict=True)]
    assert found["collective_skew_us"].value == pytest.approx(sum(pairs) / len(pairs) / 1000)
    steps = 4e6  # converts the ns of 2 ranks x 2 steps to ms per rank and step
    assert found["waiting_ms"].value == pytest.approx(sum(one.lost_ns for one in run.traces.answers.waits.ranks) / steps)
    idle = [one.idle for one in run.traces.analyses]
    for name in ("host", "communication", "other"):
        assert found[f"idle_{name}_ms"].value == pytest.approx(sum(getattr(one, f"{name}_ns") for one in idle) / steps)
    assert sum(found[f"idle_{name}_ms"].value for name in ("host", "launching", "communication", "other")) == pytest.approx(
        found["idle_ms"].value
    )
    assert found["launch_delay_us"].unit == "us"
    assert 0 <= found["hidden_pct"].value <= 100


def test_a_run_without_traces_has_no_trace_metric(results):
    loaded, _, _ = results
    (run,) = loaded.cells[2].completed_runs
    names = ("idle_host_ms", "launch_delay_us", "waiting_ms", "waiting_pct", "collective_skew_us", "bus_bandwidth_gb_per_s",
             "algorithm_bandwidth_gb_per_s", "hidden_pct", "phase_ms")  # fmt: skip
    assert {name: values(run)[name] for name in names} == dict.fromkeys(names)


def test_the_figures_show_the_metrics(results):
    _, told, group = results
    metrics = {mark.label: mark.row.metrics for mark in group.marks}
    drawn = step_parts.IDLE_FIGURE.draw(group)
    for name, label in (("idle_host_ms", "the host launched nothing"), ("idle_other_ms", "other")):
        assert part(drawn, label) == [metrics[cell][name].value for cell in ("single ×1", "ddp ×2")]
    slow = step_parts.SLOW_RANKS_FIGURE.draw(group)
    assert [note["text"] for note in slow.layout["annotations"]] == ["ddp ×2"]
    runs = step_parts.list_matched_runs(group.marks[1])
    matched = [run.ranks[place].calls[call].duration_ns for run in runs for place, call in run.waits.waited_ns]
    assert sum(part(slow, name)[0] for name in step_parts.SLOW_RANKS_FIGURE.colour_by_part) == pytest.approx(sum(matched) / 8e6)
    assert part(slow, "waiting, lost")[0] == pytest.approx(metrics["ddp ×2"]["waiting_ms"].value)
    assert step_parts.PHASES_FIGURE.draw(group) is None  # no figure of phases: these traces have only kernels
    of = [use for use in told.groups if use.bus_gb_per_s is not None]
    marks = [x for trace in rates.draw_bandwidth(group).data if trace["name"] != "link" for x in trace["x"]]
    assert sorted(marks) == sorted(use.bus_gb_per_s for use in of)
    assert part(rates.draw_bandwidth(group), "link") == [450]  # one bar only: the cell with one rank sends nothing


def test_the_parts_of_the_difference_sum_to_it(results):
    loaded, told, group = results
    (found,) = told.steps
    assert (found.cell, found.baseline) == (loaded.cells[1].id, loaded.cells[0].id)
    drawn = why_slower.draw(group)
    bars = [trace for trace in drawn.data if trace["type"] == "bar"]
    assert sum(trace["x"][0] for trace in bars) == pytest.approx(found.step.difference_ns / 1e6)
    spans = []
    for cell in loaded.cells[:2]:
        ranks = [one for run in cell.completed_runs for one in run.traces.analyses]
        spans.append(sum(one.span_ns for one in ranks) // sum(one.steps for one in ranks))
    assert (found.step.time_ns, found.step.against_ns) == (spans[1], spans[0])
    assert sum(one.difference_ns for one in found.step.parts) == spans[1] - spans[0]


def test_tables_of_the_report_are_per_step_and_rank(results):
    loaded, told, _ = results
    ddp = loaded.cells[1].id
    ranks = [support.run(seed, size=2) for seed in (5, 6)]
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        calls = [call for run in ranks for rank in run for call in rank.calls if call[0] == name]
        found = [use for use in told.groups if (use.cell, use.collective) == (ddp, name)]
        assert [use.calls for use in found] == ([len(calls) / 8] if calls else [])
        for use in found:
            assert use.message_bytes == pytest.approx(sum(call[4] for call in calls) / len(calls))
            assert use.mean_us == pytest.approx(sum(call[3] - call[2] for call in calls) / len(calls) / 1000)
    waited = [[sum(call[5] for call in run[rank].calls if call[0] != "broadcast") for run in ranks] for rank in range(2)]
    rows = [row for row in told.waiting if row.cell == ddp]
    assert [row.rank for row in rows] == [0, 1]
    assert [row.waited_ms for row in rows] == pytest.approx([sum(each) / 4e6 for each in waited])
    assert {row.n for row in rows} == {2}
    assert trace_answers.compare_steps_with_baseline(loaded.cells[2], loaded.cells[0]) is None


def test_the_command_gives_the_answers_as_json(workspace, tmp_path, capsys):
    loaded = load.load_matrix(workspace, None)
    single, ddp = (cell.completed_runs[0].run_id for cell in loaded.cells[:2])
    assert main(["trace", ddp, "--against", single, "--json", "--workspace", str(workspace.path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["group"]["name"] for one in found["collectives"]} == {"3"}
    assert {one["link_gb_per_s"] for one in found["collectives"]} == {450}
    assert [rank["rank"] for rank in found["stragglers"]["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert sum(rank["idle"].values()) == rank["idle_ns"]
        assert rank["launch_delay"]["count"] > 0
    assert sum(one["difference_ns"] for one in found["why"]["parts"]) == found["why"]["difference_ns"]
    assert main(["trace", ddp, "--against", single, "--workspace", str(workspace.path)]) == 0
    shown = capsys.readouterr().out
    assert "collectives by process group, all ranks together" in shown
    assert "idle time by cause" in shown
    assert "parts sum to the difference" in shown
    support_traces.Rank(0).write(tmp_path)
    assert main(["trace", f"{tmp_path}/", "--like-hta", "--json", "--workspace", str(workspace.path)]) == 0
    assert "stragglers" not in json.loads(capsys.readouterr().out)  # --like-hta does not compute stragglers
