"""Runs on leased machines: which runs are held back because they would end too late, and the state of cut-off runs."""

import json
import shutil
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import msgspec
import pytest
import support_collect as support
from support_queue import MATRIX, Queue, Study

from jobs.scheduler import ObservedRun, SchedulerFull, SubmitOptions
from jobs.schedulers import slurm
from jobs.status import reconcile
from jobs.status.reconcile import read_run_on_disk
from jobs.submission.backlog import Backlog
from jobs.submission.lease_schedule import LeaseSchedule
from jobs.verbs import watch
from shardlab.cluster.lease import Lease
from shardlab.runs import prediction
from shardlab.runs.prediction import PredictedRange, Prediction
from shardlab.runs.state import JudgedState
from shardlab.terminal import moments
from shardlab.terminal.console import Output
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("source_copied_faster")


def sent_runs(nodes, left_hours, *runs, at_once=None):
    """Whether each run is sent, if the lease of this number of nodes ends in `left_hours` hours.

    runs: (number of nodes, hours of its time limit) of each run; None: the run has no limit. After these two, a run may have
    the highest hours of its prediction.
    """
    now = datetime.now(UTC)
    workers = [inventory.InventoryNode(f"work{number}", "w", roles=["worker"]) for number in range(nodes)]
    leased = inventory.Inventory(1, "c", workers, Lease(now + timedelta(hours=left_hours), now, "manifest"))
    schedule = LeaseSchedule(leased, at_once=at_once)
    predicted = [Prediction(time_s=PredictedRange(1.0, 2.0, 3600.0 * run[2])) if len(run) > 2 else None for run in runs]
    return [schedule.add_run(make_run(*run[:2]), found) is None for run, found in zip(runs, predicted, strict=True)]


def make_run(nodes, hours):
    limit_s = None if hours is None else hours * 3600
    return SimpleNamespace(run_id="a", world=SimpleNamespace(nnodes=nodes), search=None, limit_s=limit_s)


def test_runs_that_need_the_same_nodes_run_one_after_another():
    assert sent_runs(2, 1.7, (1, 1), (1, 2), (1, 0.5)) == [True, False, True]
    assert sent_runs(2, 2.9, (1, 1), (2, 2), (1, 0.5)) == [True, False, True]
    assert sent_runs(2, 3.1, (1, 1), (2, 2), (1, 0.5)) == [True, True, False]
    assert sent_runs(1, 1.05, (3, 1), (1, 0.1)) == [True, False]


def test_a_run_of_unknown_time_is_sent_and_takes_no_time():
    assert sent_runs(1, 2.1, (1, None), (1, 2), (1, 1), (1, None)) == [True, True, False, True]


def test_a_run_takes_the_high_end_of_its_prediction_and_no_longer_than_its_limit():
    assert sent_runs(1, 1.2, (1, 8, 0.5), (1, 8, 0.5), (1, 8, 0.5)) == [True, True, False]
    assert sent_runs(1, 1.2, (1, 1, 9.0), (1, None, 0.1), (1, None, 0.2)) == [True, True, False]


def test_a_run_may_have_to_wait_for_another_run_although_nodes_are_free():
    assert sent_runs(4, 2.1, (1, 1), (1, 1), (1, 1), at_once=1) == [True, True, False]
    assert sent_runs(4, 2.1, (1, 1), (1, 1), (1, 1), (1, 1), (1, 1), at_once=2) == [True, True, True, True, False]
    # Runs start in their order: the last run waits until the run before it starts, although a node is free.
    assert sent_runs(3, 1.2, (2, 1), (2, 0.1), (1, 0.3)) == [True, True, False]


class Lent(Study):
    """A study on a cluster with a leased worker. Each run of the study may take 2 hours."""

    def __init__(self, path, runs):
        super().__init__(path, runs)
        self.now = datetime.now(UTC)  # set here and not at import: the tests before may take hours

    def lend(self, hours, read_hours_ago=0, workers=1):
        path = inventory.inventory_path(self.workspace)
        path.parent.mkdir(exist_ok=True)
        nodes = [{"name": "head", "host": "h", "roles": ["controller"]}]
        nodes += [{"name": f"work{number}", "host": "w", "roles": ["worker"]} for number in range(1, workers + 1)]
        until = Lease(self.now + timedelta(hours=hours), self.now - timedelta(hours=read_hours_ago), "manifest")
        path.write_bytes(msgspec.json.encode({"schema": 1, "cluster": "c", "nodes": nodes, "lease": until}))


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm.SlurmScheduler, "POLL_S", 0.0)
    one = Queue(tmp_path / "slurm", monkeypatch)
    one.rule(ends=0)
    return one


@pytest.fixture
def study(tmp_path, queue):
    one = Lent(tmp_path, 3)
    file = one.workspace.path / "cluster.yaml"
    file.write_text(file.read_text().replace("slurm: {}", 'slurm: {time: "02:00:00"}'))
    return one


def document(capsys):
    return json.loads(capsys.readouterr().out)


def sent(queue):
    return sum(1 for _ in queue.state()["tasks"])


def test_a_plan_says_which_runs_do_not_end_before_the_lease(study, capsys):
    words = ["--matrix", str(study.matrix)]
    assert study.jobs("plan", *words, "--json") == 0
    assert document(capsys)["lease"] is None
    study.lend(5)
    assert study.jobs("plan", *words, "--json") == 0
    told = document(capsys)["lease"]
    assert (told["source"], told["expires"][:16]) == ("manifest", f"{study.now + timedelta(hours=5):%Y-%m-%dT%H:%M}")
    assert study.jobs("plan", *words) == 0
    said = capsys.readouterr().out
    assert f"the lease ends {study.now + timedelta(hours=5):%Y-%m-%d %H:%M} UTC" in said
    assert "about 1 run(s) would not end before the lease. To ask for an extension: " in said
    study.lend(7, read_hours_ago=7)
    assert study.jobs("plan", *words) == 0
    said = capsys.readouterr().out
    assert "would not end before the lease" not in said
    assert "This is stale" in said


def test_runs_that_would_not_end_before_the_lease_are_held_back_until_it_is_extended(study, queue, capsys):
    study.lend(5)
    assert study.jobs("submit", "--dry-run") == 0
    assert "2 run(s) would be submitted, 1 would be held back, 0 skipped." in capsys.readouterr().out
    assert (queue.calls("sbatch"), study.workspace.runs.exists()) == ([], False)
    assert study.jobs("submit") == 1  # exit code 1: one requested run was held back
    said = capsys.readouterr().out
    assert "2 run(s) submitted, 1 held back, 0 skipped." in said
    assert "held back, because the lease ends " in said
    assert sent(queue) == 2
    (held,) = [status for status in study.statuses() if status.held]
    assert held.state == "planned"
    assert held.why.startswith("held back, because the lease ends ")
    assert study.jobs("status", "--json") == 0
    assert document(capsys)["lease"]["source"] == "manifest"
    for verb in ("submit", "retry"):  # both commands hold the run back again: the lease did not change
        assert study.jobs(verb, *(["--only", "held"] if verb == "retry" else [])) == 1
        assert "0 run(s) submitted, 1 held back" in capsys.readouterr().out
    study.lend(7)
    assert study.jobs("retry", "--only", "held") == 0
    assert "1 run(s) submitted, 0 skipped." in capsys.readouterr().out
    assert sent(queue) == 3
    assert not any(status.held for status in study.statuses())


def test_a_person_may_submit_runs_that_end_after_the_lease(study, queue, capsys):
    study.lend(5)
    assert study.jobs("submit", "--ignore-lease") == 0
    said = capsys.readouterr().out
    assert "3 run(s) submitted, 0 skipped." in said
    assert "the lease ends " in said
    assert sent(queue) == 3


def backlogs(study, queue, capsys, *, pack=False, ignore_lease=False):
    """The backlog (runs to submit later) with the three runs of the study.

    The runs would end before the lease, but Slurm accepted none of them, because its limit was reached.
    """
    study.lend(7)
    queue.rule(places=0, says=["sbatch: error: Batch job submission failed: Job violates accounting/QOS policy"])
    study.jobs("submit")
    assert study.states() == ["planned"] * 3
    queue.rule(ends=0)
    capsys.readouterr()
    full = SchedulerFull("Slurm", "full", study.workspace.list_run_dirs())
    return Backlog(study.workspace, "slurm", SubmitOptions(is_packed=pack, ignore_lease=ignore_lease), full)


@pytest.mark.parametrize(("pack", "workers"), [(False, 1), (True, 3)])
def test_runs_that_are_sent_later_are_judged_against_the_lease_of_that_time(pack, workers, study, queue, capsys):
    waiting = backlogs(study, queue, capsys, pack=pack)
    study.lend(5, workers=workers)  # the lease now ends earlier than when the runs were planned
    while waiting:
        waiting.submit_more_runs(study.statuses())
    assert (sent(queue), sorted(study.states())) == (1 if pack else 2, ["pending", "pending", "planned"])
    (held,) = [status for status in study.statuses() if status.held]
    assert held.why.startswith("held back, because the lease ends ")


def test_a_run_that_another_command_held_back_is_not_sent_later(study, queue, capsys):
    waiting = backlogs(study, queue, capsys)
    waiting.folders[0].write_event("controller", "held", why="the lease")
    while waiting:
        waiting.submit_more_runs(study.statuses())
    assert sent(queue) == 2


def test_a_waiting_command_ends_after_it_holds_back_its_remaining_runs(study, queue, capsys):
    waiting = backlogs(study, queue, capsys)
    study.lend(1)
    run_ids = [folder.run_id for folder in study.workspace.list_run_dirs()]
    assert watch.wait_and_report(Output(), study.workspace, run_ids, wait=True, backlog=waiting) == 1
    said = capsys.readouterr()
    assert "3 run(s) did not start" in said.out
    assert "held back, because the lease ends" in said.out
    assert "not submitted" not in said.err
    assert sent(queue) == 0


def test_a_person_may_have_held_runs_submitted_later(study, queue, capsys):
    waiting = backlogs(study, queue, capsys, ignore_lease=True)
    study.lend(1)
    while waiting:
        waiting.submit_more_runs(study.statuses())
    assert sent(queue) == 3


def test_a_run_behind_runs_submitted_now_is_not_judged_by_the_lease(study, queue, capsys):
    waiting = backlogs(study, queue, capsys)
    study.lend(5)
    waiting.submit_more_runs(study.statuses())
    assert (sent(queue), len(waiting.folders)) == (1, 2)
    study.lend(7)
    while waiting:
        waiting.submit_more_runs(study.statuses())
    assert sent(queue) == 3


def test_held_runs_can_be_cancelled(study, queue, capsys):
    study.lend(1)
    assert study.jobs("submit") == 1
    assert study.jobs("cancel", "--all") == 0
    assert {status.state for status in study.statuses()} == {"cancelled"}
    assert queue.calls("sbatch") == []


def test_a_packed_allocation_takes_the_runs_one_after_another_on_many_nodes(study, queue, capsys):
    file = study.workspace.path / "cluster.yaml"
    file.write_text(file.read_text().replace("{name: work1}", "{name: work1}, {name: work2}, {name: work3}"))
    study.lend(5, workers=3)
    assert study.jobs("submit", "--dry-run") == 0
    assert "3 run(s) would be submitted, 0 skipped." in capsys.readouterr().out
    for words in (["--pack"], ["--max-parallel", "1"]):
        assert study.jobs("submit", "--dry-run", *words) == 0
        assert "2 run(s) would be submitted, 1 would be held back" in capsys.readouterr().out


def test_the_measured_time_of_a_cell_counts_before_its_time_limit(study, queue, capsys):
    study.matrix.write_text(MATRIX.replace("SEEDS", "[0]") + "repeats: 3\n")
    assert study.jobs("submit") == 0
    done, *others = study.workspace.list_run_dirs()
    completed(done, took_s=600)
    for other in others:
        shutil.rmtree(other.path)
    (queue.folder / "queue.json").write_text(json.dumps({"last": 9, "most": 0, "looks": 0, "tasks": []}))
    study.lend(0.5)
    assert study.jobs("submit", "--dry-run") == 0
    assert "2 run(s) would be submitted, 1 skipped." in capsys.readouterr().out
    study.lend(0.25)
    assert study.jobs("submit", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "1 run(s) would be submitted, 1 would be held back, 1 skipped." in said
    assert "(by recorded times)" in said


def test_the_stored_prediction_of_a_run_counts_before_its_time_limit(study, queue, capsys):
    """Of three runs with limits of two hours each, one would end within the lease; by their predictions, all three would."""
    study.lend(3)
    assert study.jobs("submit") == 1
    assert "1 run(s) submitted, 2 held back" in capsys.readouterr().out
    stored = msgspec.json.encode(Prediction(time_s=PredictedRange(60.0, 120.0, 600.0)))
    for folder in study.workspace.list_run_dirs():
        prediction.find_prediction_path(folder.path).write_bytes(stored)
    assert study.jobs("retry", "--only", "held") == 0
    assert "2 run(s) submitted, 0 skipped." in capsys.readouterr().out


def completed(folder, took_s):
    """Write the records of a completed run.

    took_s: the time from the start of the run to its end, in seconds.
    """
    support.event(folder, "started", 0)
    support.train(folder)
    support.finish(folder, took_s - 1)


def test_a_cluster_without_a_lease_gives_no_remark(study, capsys):
    assert study.jobs("submit") == 0
    study.jobs("status")
    assert "lease" not in capsys.readouterr().out
    study.jobs("status", "--json")
    assert "lease" not in document(capsys)


END = datetime.fromtimestamp(support.START_S + 3600, UTC)
OVER = Lease(END, END - timedelta(hours=1), "portal")


def judged(folder, state, last_s, *, unanswered=False, lease=OVER, now=END + timedelta(hours=1), ended=None):
    """The state of a run, judged with the end of the lease.

    state: what the scheduler reports. last_s: the time of the run's last record, in seconds after the end of the lease.
    unanswered: whether the scheduler did not answer. ended: the end that the supervisor recorded.
    """
    support.event(folder, "started", 3600 + last_s)
    seen = ObservedRun(JudgedState(state, "as it says"), "7", state, is_unanswered=unanswered)
    return reconcile.judge_with_lease(read_run_on_disk(folder), seen, lease, ended, now)


@pytest.fixture
def folder(tmp_path):
    return support.prepare(Workspace(tmp_path), support.cell(), 1)


def test_a_node_that_is_lost_at_the_end_of_the_lease_is_lost_for_that_reason(folder):
    assert judged(folder, "node_fail", -5) == JudgedState(
        "node_fail", f"the lease of the nodes ended {moments.format_time(END)}: as it says"
    )


@pytest.mark.parametrize(
    ("state", "last_s", "more"),
    [
        ("node_fail", -5, {"lease": None}),
        ("node_fail", -5, {"now": END - timedelta(seconds=1)}),  # now is before the end of the lease
        ("node_fail", -3000, {}),  # the last record is long before the end of the lease
        ("node_fail", -5, {"ended": END - timedelta(seconds=2)}),  # the supervisor recorded an end before the lease ended
        ("running", -5, {}),  # the scheduler answers, so the lease was extended
        ("running", 5, {"unanswered": True}),  # records after the end: the lease was extended
        ("completed", -5, {"unanswered": True}),
        ("failed", -5, {}),
    ],
)
def test_the_end_of_the_lease_explains_only_lost_nodes(folder, state, last_s, more):
    assert judged(folder, state, last_s, **more) == JudgedState(state, "as it says")


@pytest.mark.parametrize(
    ("state", "last_s", "expected", "says"),
    [
        ("running", -5, "node_fail", "while the run was running"),
        ("pending", -5, "node_fail", "before the run started"),
        ("running", -3000, "unknown", "how the run ended is not known"),
    ],
)
def test_runs_on_unreachable_nodes_are_judged_by_the_end_of_the_lease(folder, state, last_s, expected, says):
    told = judged(folder, state, last_s, unanswered=True)
    assert (told.state, says in told.why) == (expected, True)


def test_the_status_of_fetched_runs_after_the_lease(study, queue, capsys):
    study.lend(7)
    assert study.jobs("submit") == 0
    study.lend((datetime.now(UTC) - study.now) / timedelta(hours=1))  # the lease ends now, after all records
    queue.rule(away=True)
    capsys.readouterr()
    assert study.jobs("status", "--json") in (0, 1)
    runs = document(capsys)["runs"]
    assert {(run["state"], run["why"].partition(" 20")[0]) for run in runs} == {("node_fail", "the lease of the nodes ended")}


def test_a_run_held_before_its_submission_is_planned_and_later_pending(folder):
    support.event(folder, "held", 1, why="the lease")
    assert folder.judge() == JudgedState("planned", "the lease", held=True)
    support.event(folder, "submitted", 0)
    assert folder.judge() == JudgedState("pending", "the lease", held=True)
    support.event(folder, "refused", 0.5, why="no room")
    assert folder.judge() == JudgedState("planned", "the lease", held=True)
    support.event(folder, "refused", 2, why="no room")
    assert folder.judge() == JudgedState("planned", "no room")
