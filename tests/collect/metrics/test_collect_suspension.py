"""A run that was suspended for some time: which of its values are still used, and the remark about the run in the report."""

import msgspec
import pytest
import support_collect as support

from collect.metric import compute_quantities
from collect.metrics.accuracy import compute_time_to_accuracy
from collect.metrics.energy import measure_energy
from collect.reading.load import load_matrix
from collect.summary import summarize
from shardlab.runs.record import LineWriter, ValidationRecord
from shardlab.runs.rundir import VALIDATION_FILE
from shardlab.workspace.workspace import Workspace

CELL = support.cell()
TIMES = {"train_time_s": 9.9, "epoch_time_s": [9.9], "throughput_per_s": 1.0, "step_time_ms": None}


@pytest.fixture
def workspace(tmp_path):
    made = Workspace(tmp_path)
    support.keep(made, [CELL], repeats=2)
    for repeat in (1, 2):
        folder = support.completed(made, CELL, repeat, found=TIMES)
        with LineWriter(folder.path / VALIDATION_FILE) as lines:
            lines.write_record(ValidationRecord(schema=1, step=10, t_s=0, wall_s=0, loss=1, accuracy=0.5, items=8))
    return made


def paused(workspace, at):
    """Record that the second run was suspended for 0.25 s, and that it resumed in the middle of a timed step.

    at: which timed step, from 1. Returns the numbers of the timed steps that are still used.
    """
    folder = load_matrix(workspace, None).cells[0].runs[1].folder
    end_s = folder.steps(0).records[CELL.warmup_steps + at - 1].wall_s - 0.05
    support.event(folder, "stood_still", end_s - support.START_S, seconds=0.25)
    return [record.step for record in folder.steps(0).records if not record.warmup and record.step not in range(at - 2, at + 1)]


def test_suspended_steps_are_not_counted_and_times_over_them_are_unknown(workspace):
    """Steps during a suspension do not count. The training time, which includes the suspension, has no value."""
    left = paused(workspace, 5)
    summary = summarize(load_matrix(workspace, None), "single")
    assert f"suspended or stopped during timed steps; times that include the pause do not count: {CELL.name()}-r2" in (
        summary.remarks
    )
    first, second = summary.rows[0].runs
    assert {"train_time_s", "epoch_time_s"} <= set(first.metrics)
    assert not {"train_time_s", "epoch_time_s", "epoch_time_median_s"} & set(second.metrics)
    times = [support.step_ms(CELL, 0, step, 2) for step in left]
    assert second.metrics["throughput_per_s"] == pytest.approx(2 * support.TOKENS * len(left) / (sum(times) / 1000))
    assert second.metrics["final_loss"] == first.metrics["final_loss"]


def test_a_suspended_run_has_no_metric_that_spans_several_steps(workspace):
    """A suspended run has no value for time to accuracy and energy, which cover several steps."""

    def found(number):
        (cell,) = load_matrix(workspace, None).cells
        run = cell.runs[number]
        return compute_time_to_accuracy(run, 50), measure_energy(run)

    for folder in workspace.list_run_dirs():
        lines = folder.samples_file(support.HOST).read_text().replace('"gpus":null,', "")
        power = '"gpus":[{"uuid":"GPU-0","power_w":100.0}],"nics"'
        folder.samples_file(support.HOST).write_text(lines.replace('"nics"', power))
    paused(workspace, 5)
    accurate, drew = found(0)
    assert (accurate.unit, drew.unit) == ("s", "J")
    assert found(1) == (None, None)


def test_a_suspension_between_two_steps_removes_no_step(workspace):
    """A suspension between two steps removes no step, but the training time has no value."""
    folder = load_matrix(workspace, None).cells[0].runs[1].folder
    path = folder.steps_file(0)
    records = folder.steps(0).records
    path.unlink()
    with LineWriter(path) as lines:
        for record in records:
            lines.write_record(
                msgspec.structs.replace(record, wall_s=record.wall_s + 60 * (record.step > 5 and not record.warmup))
            )
    support.event(folder, "stood_still", records[6].wall_s - support.START_S + 59, seconds=58)
    (cell,) = load_matrix(workspace, None).cells
    assert not cell.runs[1].timed_steps["watched"].any()
    assert not {"train_time_s", "epoch_time_s"} & set(compute_quantities(cell.runs[1]))


def test_a_suspension_before_the_first_step_removes_no_step(workspace):
    folder = load_matrix(workspace, None).cells[0].runs[1].folder
    support.event(folder, "stood_still", -1.0, seconds=0.25)  # the run was suspended before the first step
    summary = summarize(load_matrix(workspace, None), "single")
    assert "train_time_s" in summary.rows[0].runs[1].metrics
    assert not any("suspended or stopped" in remark for remark in summary.remarks)
