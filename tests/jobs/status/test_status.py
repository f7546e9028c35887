"""`jobs status`: the start, the end and the duration of a run, and the table on a narrow terminal."""

import json
import re
from datetime import UTC, datetime

import pytest
import support_collect as support
from support_hostile import on_terminal

from jobs.cli import main
from jobs.status import reconcile
from jobs.status.reconcile import Status
from jobs.verbs import status_table, watch
from shardlab.runs import recorder_ends
from shardlab.runs.record import SCHEMA, Event, LineWriter
from shardlab.terminal import moments
from shardlab.workspace.workspace import Workspace

STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
START = "2025-10-09T08:53:20Z"  # support.START_S as text


def status_of(workspace, capsys):
    assert main(["status", "--json", "--workspace", str(workspace.path)]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    return run


@pytest.fixture
def folder(tmp_path):
    """The folder of a run that was rendered and not submitted. It was rendered five seconds before START."""
    return support.prepare(Workspace(tmp_path), support.cell(), 1)


def events(folder, *said, writer="attempt"):
    """Write events of a run. said: for each event, a tuple (name, seconds after START, data of the event)."""
    with LineWriter(folder.events_file(writer)) as lines:
        for name, after_s, data in said:
            at = support.START_S + after_s
            lines.write_record(Event(schema=SCHEMA, event=name, writer=writer, wall_s=at, host=support.HOST, data=data))


STARTED, OVER = ("started", 0, {}), ("exited", 83.5, {"code": 1, "reason": "failed", "why": "it failed"})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([], (None, None, None)),
        ([STARTED, OVER], (START, "2025-10-09T08:54:43.500000Z", 83.5)),
        # A requeued run has its first start and its last end, so the duration includes the wait for the second start.
        ([STARTED, ("exited", 10, {"code": 98, "reason": "timeout"}), ("started", 40, {}), OVER],
         (START, "2025-10-09T08:54:43.500000Z", 83.5)),
        # If the clock was set back, the end may be before the start. Then the end and the duration are not shown.
        ([("started", 100, {}), ("exited", 83.5, {"code": 1, "reason": "failed", "why": ""})],
         ("2025-10-09T08:55:00Z", None, None)),
    ],
)  # fmt: skip
def test_start_end_and_duration_of_a_run(folder, capsys, said, expected):
    events(folder, *said)
    run = status_of(Workspace(folder.path.parent.parent), capsys)
    assert (run["started"], run["ended"], run["duration_s"]) == expected


@pytest.mark.parametrize("state", ["node_fail", "timeout"])
def test_a_run_whose_supervisor_was_lost_has_a_start_and_no_end(folder, capsys, state):
    events(folder, STARTED)
    # The queue writes this event long after the run ended, when it finds that the run's supervisor is gone.
    events(folder, ("exited", 5000, {"code": None, "reason": state, "why": "the machine rebooted"}), writer="queue")
    run = status_of(Workspace(folder.path.parent.parent), capsys)
    assert (run["state"], run["started"], run["ended"], run["duration_s"]) == (state, START, None, None)


def test_a_tracker_and_a_sampler_that_ended_early_are_shown(folder, capsys):
    events(folder, STARTED)
    events(folder, ("tracker_ended", 3, {"code": 1}), writer="tracker")
    assert status_of(Workspace(folder.path.parent.parent), capsys)["trouble"] == [
        "the tracker ended early (exit code 1): see log/tracker.log"
    ]
    events(folder, ("sampler_ended", 1, {"code": -9}), ("sampler_ended", 2, {"code": -11}), writer="node")
    assert main(["status", "--workspace", str(folder.path.parent.parent)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    sampler = (
        f"the sampler of {support.HOST} ended 2 times while the run went on (exit code -11): see log/sampler.{support.HOST}.log"
    )
    assert f"{sampler}; the tracker ended early (exit code 1): see log/tracker.log" in said


@pytest.mark.parametrize("data", [{}, {"code": "<b>1</b>"}, {"code": True}])
def test_an_end_without_a_code_gives_no_code(data):
    """If the event has no number as exit code, the sentence has no exit code."""
    ended = Event(schema=SCHEMA, event="tracker_ended", writer="tracker", wall_s=1.0, host="h", data=data)
    assert recorder_ends.describe_early_ends([ended]) == ["the tracker ended early: see log/tracker.log"]


@pytest.mark.parametrize(("state", "has_end"), [("timeout", True), ("completed", True), ("pending", False), ("unknown", False)])
def test_a_run_that_slurm_starts_again_has_not_ended(folder, state, has_end):
    events(folder, STARTED, ("exited", 10, {"code": 98, "reason": "timeout"}))
    started, ended = reconcile.find_run_span(folder.read_events(), state)
    assert started is not None
    assert (ended is not None) is has_end


def test_a_table_says_local_times_with_their_zone(folder):
    events(folder, STARTED, OVER)
    said = on_terminal(["-m", "jobs", "status", "--workspace", str(folder.path.parent.parent)], 120, TZ="Asia/Kolkata")
    said = STYLES.sub("", said)
    assert "2025-10-09 14:23  14:24:43  1m 24s" in said
    assert "Times are IST." in said


def test_without_a_start_no_zone_is_named(folder, capsys):
    """If no run has started, the table shows no times, so it does not name a time zone."""
    assert main(["status", "--workspace", str(folder.path.parent.parent)]) == 0
    assert "Times" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0s"), (0.4, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (83.5, "1m 24s"), (3599.4, "59m 59s"), (3599.6, "1h 00m"),
        (7384, "2h 03m"), (86399, "23h 59m"), (86400, "1d 00h"), (200000, "2d 07h"),
    ],
)  # fmt: skip
def test_durations_are_shown_in_two_units(seconds, said):
    assert moments.format_duration(seconds) == said


def status(number, state="completed", **more):
    at = datetime(2026, 5, 1, 12, 0, number % 60, tzinfo=UTC)
    known = {
        "id": f"ddp-gpt2-tiny-g2-b8-2255b0937cfb-r{number}", "cell": None, "state": state, "why": "",
        "scheduler": {"name": "slurm", "id": "1234567", "raw": "COMPLETED"}, "step": 10, "steps": 10, "throughput": 7702.0,
        "unit": "tokens", "eta_s": None, "started": at, "ended": at, "duration_s": 0.0, "hosts": [], "attempt": 1, "repeat": 1,
        "rehearsal": False, "expected": state == "completed",
    }  # fmt: skip
    return Status(**(known | more))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_table_line_is_folded_if_names_and_states_fit_the_terminal(width):
    runs = [status(1), status(2, "failed", why="rank 0: ValueError: " + "shapes " * 30), status(3, "running", eta_s=4000.0)]
    shown = status_table.make_table(runs, width)
    assert shown.headings[:2] == ["run", "state"]
    line = sum(2 + max(map(len, column)) for column in zip(shown.headings, *shown.texts, strict=True)) - 2
    if "why" in shown.headings:
        assert width - (line - len(shown.texts[1][-1])) >= 36, "a reason that is folded still has room to be read"
        assert status_table.list_reasons(shown) == []
    else:
        assert line <= max(width, 46)
        assert status_table.list_reasons(shown) == [f"{runs[1].id}: {runs[1].why}"]


def test_on_80_columns_running_runs_show_progress_and_ended_runs_their_end():
    ended, going = [status(1)], [status(1), status(2, "running", eta_s=4000.0, ended=None)]
    assert status_table.make_table(ended, 80).headings == ["run", "state", "started", "ended", "took"]
    assert status_table.make_table(going, 80).headings == ["run", "state", "step", "to go", "took"]
    assert {*status_table.HIDDEN_WHILE_RUNNING} < {*status_table.make_table(going).headings}, "a pipe has all columns"


def test_an_empty_column_is_left_out():
    waiting = status(1, "pending", started=None, ended=None, duration_s=None, step=None, throughput=None)
    assert status_table.make_table([waiting], 200).headings == ["run", "state", "scheduler"]


def test_a_live_table_higher_than_the_terminal_shows_running_and_failed_runs():
    runs = [status(number) for number in range(30)]
    runs[25] = status(25, "running", ended=None)
    runs[28] = status(28, "failed", why="x")
    runs[29] = status(29, "pending", started=None, ended=None)
    shown = status_table.make_table(runs, 80, 12)
    assert [run.id for run in shown.rows] == [run.id for run in (*runs[:3], runs[25], runs[28], runs[29])]
    assert len(status_table.make_table(runs, 80, 100).rows) == 30


def test_a_live_table_fits_the_terminal_and_counts_the_hidden_rows(tmp_path):
    workspace = Workspace(tmp_path)
    for repeat in range(1, 31):
        events(support.prepare(workspace, support.cell(), repeat), STARTED, OVER)
    said = on_terminal(["-m", "jobs", "status", "--watch", "--workspace", str(tmp_path)], 80, LINES="24", NO_COLOR="1")
    drawn, *rest = STYLES.sub("", said).partition("12 of them not shown.")
    assert any(rest)
    assert drawn.count("failed") == 18 + 1  # 18 rows, and the line that counts runs
    assert all(len(line) <= 80 for line in drawn.split("\n"))


def test_a_line_of_progress_has_rate_failures_and_time_left(monkeypatch):
    """Of 6 runs one had ended before; two more end within 30 s, so the other three need 45 s."""
    clock = [100.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    before = [status(1), status(2, "running"), *(status(number, "pending") for number in range(3, 7))]
    progress = watch.WaitProgress(before)
    assert progress.describe(before) == "1 of 6 run(s) ended, 0 failed, 1 running"
    clock[0] += 10
    one_more = [status(1), status(2), status(3, "running"), *(status(number, "pending") for number in range(4, 7))]
    assert not progress.is_news(one_more), "a pipe gets a line every 15 s"
    clock[0] += 10
    assert progress.is_news(one_more)
    assert not progress.is_news(one_more), "nothing changed"
    clock[0] += 10
    failed = [status(1), status(2), status(3, "failed"), *(status(number, "pending") for number in range(4, 7))]
    assert progress.is_news(failed), "a failure is told at once"
    assert progress.describe(failed) == "3 of 6 run(s) ended, 1 failed, 0 running, 4 per minute, about 45s left"
