"""The report of cells with a fault on purpose: numbers that are known, and marks that tell them from ordinary cells."""

import pytest
import support_collect as support
from support_collect import START_S

from collect import figure
from collect.figures import scaling, step_parts
from collect.findings import columns, injected_faults
from collect.reading import load
from collect.report import page, summary_tables
from collect.summary import summarize
from shardlab.matrix.cell import Instruments
from shardlab.matrix.faults import ENDED_ON_PURPOSE, LostWorker, SlowedRank
from shardlab.runs.record import LineWriter, StepRecord
from shardlab.workspace.workspace import Workspace

ORDINARY = Instruments()
SLOWED = Instruments(straggler=SlowedRank(rank=1, delay_ms=50))
LOST = Instruments(lost_worker=LostWorker(rank=1, step=4))
UNITS = 100  # of a rank in a step


def server(strategy, instruments=ORDINARY, **options):
    return support.cell(strategy, 2, "fork", servers=1, warmup_steps=0, instruments=instruments, options=options)


def train(workspace, cell, *ranks, steps=(10, 10), code=0, events=(), **found):
    """Write a run. ranks: for each rank the times (data, forward, backward, optimizer) in ms of all its steps.

    steps: the number of steps of each rank. found: fields of its result."""
    folder = support.prepare(workspace, cell)
    support.event(folder, "started", -2)
    support.environment(folder)
    for rank, times in enumerate(ranks):
        with LineWriter(folder.steps_file(rank)) as lines:
            for step in range(1, steps[rank] + 1):
                now = sum(times) * step / 1000
                phases = dict(zip(("data_ms", "forward_ms", "backward_ms", "optimizer_ms"), times, strict=True))
                moments = {"t_s": now, "wall_s": START_S + now, "loss": 5.0 - 0.1 * step}
                lines.write_record(StepRecord(schema=1, step=step, units=UNITS, step_ms=sum(times), **moments, **phases))
    for name, why in events:
        support.event(folder, name, 1, why=why)
    if code:
        support.event(folder, "exited", 9, code=code)
        return
    support.finish(folder, 9, **found)


def counts(*ages):
    return {"knobs": {"effective": {"staleness_counts": {str(age): 1 for age in ages}}}}


@pytest.fixture
def summarized(tmp_path):
    """A summary of a synchronous and an asynchronous server, each ordinary, with a slowed rank, and with a lost worker.

    Each rank needs 1 ms for data, 40 ms to compute and 9 ms for its update, and in the synchronous server also waits."""
    workspace = Workspace(tmp_path)
    cells = [server(name, instruments) for name in ("ps-sync", "ps-async") for instruments in (ORDINARY, SLOWED, LOST)]
    support.keep(workspace, cells, repeats=1)
    sync, sync_slowed, sync_lost, free, free_slowed, free_lost = cells
    train(workspace, sync, (1, 10, 30, 9), (1, 10, 30, 9), **counts(0))
    train(workspace, sync_slowed, (1, 10, 30, 59), (51, 10, 30, 9), **counts(0))
    why = LOST.lost_worker.why
    train(workspace, sync_lost, (1, 10, 30, 9), (1, 10, 30, 9), steps=(3, 3), code=137, events=[(ENDED_ON_PURPOSE, why)])
    train(workspace, free, (1, 10, 30, 9), (1, 10, 30, 9), **counts(0, 2))
    train(workspace, free_slowed, (1, 10, 30, 9), (51, 10, 30, 9), **counts(1, 5))
    train(workspace, free_lost, (1, 10, 30, 9), (1, 10, 30, 9), steps=(10, 3), events=[(ENDED_ON_PURPOSE, why)], **counts(0, 1))
    loaded = load.load_matrix(workspace, None)
    return loaded, summarize(loaded, "ps-sync")


def test_a_slowed_rank_makes_others_wait_only_if_they_are_synchronous(summarized):
    _, summary = summarized
    sync, free = summary.slowed
    assert (sync.rank, sync.delay_ms, sync.found, free.found) == (1, 50.0, 1, 1)
    assert sync.waiting_ms == pytest.approx([50, 0])
    assert free.waiting_ms == pytest.approx([0, 0])
    # By the slowest rank: 200 units in 100 ms. By each rank's own time: 100 units in 50 ms and 100 units in 100 ms.
    assert (sync.throughput_per_s, free.throughput_per_s) == (pytest.approx(2000), pytest.approx(2000))
    assert (sync.rank_throughput_per_s, free.rank_throughput_per_s) == (pytest.approx(2000), pytest.approx(3000))
    assert (sync.ordinary_throughput_per_s, free.ordinary_rank_throughput_per_s) == (pytest.approx(4000), pytest.approx(4000))
    assert (free.staleness_mean, free.ordinary_staleness_mean) == (3, 1)


def test_a_lost_worker_costs_the_rest_of_its_units_or_the_rest_of_the_run(summarized):
    _, summary = summarized
    sync, free = summary.lost
    # Until the loss, after 150 ms, both ranks made 3 steps; then the other rank made 7 steps in 350 ms.
    assert (sync.state, sync.before_per_s, sync.after_per_s) == ("failed", pytest.approx(600 / 0.15), None)
    assert (free.state, free.before_per_s, free.after_per_s) == (
        "completed",
        pytest.approx(600 / 0.15),
        pytest.approx(700 / 0.35),
    )
    assert (sync.unseen_units, sync.unseen_pct) == (pytest.approx(1400), pytest.approx(70))
    assert (free.unseen_units, free.unseen_pct) == (pytest.approx(700), pytest.approx(35))
    assert (sync.last_step, sync.last_loss) == (3, pytest.approx(4.7))
    assert (free.last_step, free.last_loss) == (10, pytest.approx(4.0))
    assert free.ordinary_loss == pytest.approx(4.0)
    row = next(row for row in summary.rows if row.id == free.cell)
    assert row.metrics["final_loss"].value == pytest.approx(4.0)
    assert row.metrics["throughput_per_s"].value == pytest.approx(1300 / 0.5)


def test_a_cell_with_a_fault_is_marked_in_labels_and_remarks(summarized):
    _, summary = summarized
    labels = columns.make_row_labels(summary.rows)
    assert [label.partition(", ")[2] for label in labels] == ["", "rank 1 slowed by 50 ms", "rank 1 lost at step 4"] * 2
    (remark,) = [said for said in summary.remarks if "not those of an ordinary run" in said]
    assert all(label in remark for label in labels if ", " in label)
    assert labels[0] not in remark.split(": ")[1].split("; ")
    only = [row for row in summary.rows if "slowed" in str(row.flat_cell.get("fault"))]
    assert [column.name for column in columns.make_cell_tables(only).summary_table.columns][:3] == ["strategy", "gpus", "fault"]
    assert all("slowed" in label for label in columns.make_row_labels(only)), "also if all cells have the fault"


def test_a_cell_with_a_fault_is_only_compared_with_its_like(summarized):
    _, summary = summarized
    fault_of = {row.id: row.flat_cell.get("fault") for row in summary.rows}
    assert [fault_of[row.baseline] == fault_of[row.id] for row in summary.rows if row.baseline] == [True] * 4
    for family in summary.choices:
        assert len({fault_of[one.cell] for contest in family.contests for one in contest.contenders}) == 1


def test_the_page_has_both_tables_and_the_figure(summarized, tmp_path):
    loaded, summary = summarized
    text = page.draw_page(loaded, summary, tmp_path / "report", tmp_path / "runs")
    slowed, lost = summary_tables.make_fault_tables(summary, summary.labels_by_cell)
    for table in (slowed, lost):
        assert table.title in text
    assert slowed.texts[0][4:7] == ["2,000 (4,000)", "2,000 (4,000)", "50, 0"]
    assert lost.texts[0][4] == ""
    (group,) = figure.group_by_workload(loaded, summary)
    drawn = step_parts.draw_stragglers(group)
    bars = {trace["name"]: trace["x"] for trace in drawn.data if trace["type"] == "bar"}
    assert bars["waiting for others"] == pytest.approx([0, 25, 0, 0])
    assert bars["delay on purpose"] == pytest.approx([0, 25, 0, 25])
    assert bars["work"] == pytest.approx([50, 50, 50, 50])
    assert bars["throughput of the ranks"] == pytest.approx([4000, 2000, 4000, 3000])


def test_a_matrix_without_faults_has_neither_tables_nor_figure(tmp_path):
    workspace, cell = Workspace(tmp_path), server("ps-sync")
    support.keep(workspace, [cell], repeats=1)
    train(workspace, cell, (1, 10, 30, 9), (1, 10, 30, 9))
    loaded = load.load_matrix(workspace, None)
    summary = summarize(loaded, "ps-sync")
    assert summary_tables.make_fault_tables(summary, summary.labels_by_cell) == []
    assert injected_faults.describe_cells_with_faults(summary.rows) == []
    (group,) = figure.group_by_workload(loaded, summary)
    assert step_parts.draw_stragglers(group) is None
    assert scaling.draw_pull_interval(group) is None


def test_the_interval_of_pulls_is_an_axis_of_a_figure(tmp_path):
    workspace = Workspace(tmp_path)
    cells = [server("ps-async", pull_interval=interval) for interval in (4, 1)]
    support.keep(workspace, [*cells, server("ps-sync")], repeats=1)
    for cell, (staleness, sent) in zip(cells, ((5, 1.25e6), (1, 2e6)), strict=True):
        found = {
            "final_accuracy": 0.5 + staleness / 100,
            "train_time_s": 10.0 / staleness,
            "communication_bytes": {"counted": sent},
        }
        train(workspace, cell, (1, 10, 30, 9), (1, 10, 30, 9), **counts(staleness), **found)
    loaded = load.load_matrix(workspace, None)
    (group,) = figure.group_by_workload(loaded, summarize(loaded, "ps-sync"))
    drawn = scaling.draw_pull_interval(group)
    assert [trace["x"] for trace in drawn.data] == [[1, 4]] * 4
    assert [trace["y"] for trace in drawn.data[:3]] == [pytest.approx([51, 55]), [1, 5], [10, 2]]
    assert drawn.data[3]["y"] == pytest.approx([2e6 / 2**20, 1.25e6 / 2**20])
    assert [drawn.layout[f"yaxis{number}"]["title"]["text"].split(",")[0] for number in ("", 2, 3, 4)] == [
        "accuracy", "staleness", "training time", "sent per step",
    ]  # fmt: skip


def test_hostile_text_of_a_state_is_escaped(tmp_path):
    workspace, cell = Workspace(tmp_path), server("ps-sync", LOST)
    support.keep(workspace, [cell], repeats=1, title="<script>alert(1)</script>")
    train(workspace, cell, (1, 10, 30, 9), (1, 10, 30, 9), steps=(3, 3), code=1, events=[(ENDED_ON_PURPOSE, "<img src=x>")])
    loaded = load.load_matrix(workspace, None)
    text = page.draw_page(loaded, summarize(loaded, "ps-sync"), tmp_path / "report", tmp_path / "runs")
    assert "<img src=x>" not in text
