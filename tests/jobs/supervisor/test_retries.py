"""Runs that are started again by themselves: the budget, the queue of this machine with its real runner, and jobs of Slurm."""

import os
import re
import shutil
import signal
import subprocess
import sys

import msgspec
import pytest
from support_cells import CELL
from support_e2e import HANG_S
from support_trust import make_own

from jobs import claim
from jobs.rendering import render, sbatch_options
from jobs.run_queue import RunQueue
from jobs.status import retry_budget
from jobs.status.reconcile import read_statuses
from jobs.submission import submit
from jobs.supervisor import retries
from jobs.verbs import watch
from shardlab.cluster import cluster
from shardlab.cluster.cluster import THIS_MACHINE
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.matrix import matrix
from shardlab.matrix.retry import Retry
from shardlab.runs.run import Run, World, make_run_id
from shardlab.runs.rundir import RunDir
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

SCRIPT = """\
cd {{ folder }} && exec {{ python }} -P -m jobs.supervisor.attempt . -- sh -c 'echo x >> ../../starts; exit 9'
"""


@pytest.fixture
def workspace(tmp_path):
    made = make_own(tmp_path / "w")
    (made.own_templates / "launch").mkdir(parents=True)
    (made.own_templates / "launch" / "local.sh.j2").write_text(SCRIPT)
    return made


def context(workspace, **changed) -> render.RenderContext:
    source = render.make_render_context("m", THIS_MACHINE, workspace)
    return msgspec.structs.replace(source, **{"retry": Retry(failed=1, node_fail=2), **changed})


def submitted(workspace, **changed) -> RunDir:
    """Make a submitted run, with the template of this test as its script."""
    source = context(workspace)
    run = msgspec.structs.replace(render.make_run(CELL, 1, 1, source), **changed)
    folder = render.write_run_folder(run, workspace.runs, source)
    folder.write_event("controller", "submitted", scheduler=run.scheduler)
    return folder


def attempt(workspace, number) -> RunDir:
    return RunDir(workspace.runs / make_run_id(CELL, 1, number))


def end(state, code=9):
    """The data of the event with which a supervisor records this end; `told`: Slurm told the run to end."""
    return {"code": code, "reason": None if state == "failed" else state, "why": "", "steps": None}


def test_the_runner_starts_a_failed_run_again_once_and_each_attempt_is_on_record(workspace, tmp_path):
    first = submitted(workspace)
    words = [sys.executable, "-P", "-m", "jobs.schedulers.local", str(workspace.path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (workspace.path / "starts").read_text().splitlines() == ["x", "x"]
    second = attempt(workspace, 2)
    assert workspace.list_run_ids() == [first.run_id, second.run_id]
    assert [folder.judge().state for folder in (first, second)] == ["failed", "failed"]
    assert (second.read_run().attempt, second.read_run().retried) == (2, ["failed"])
    assert second.read_run().resume == []
    # The end of the first attempt is recorded after the second is in the queue, so nobody sees a gap between the two.
    (queued,) = [event for event in second.read_events() if event.event == "submitted"]
    (ended,) = [event for event in first.read_events() if event.event == "exited"]
    assert queued.wall_s < ended.wall_s
    (step,) = submit.decide_runs(workspace, [CELL], {CELL.name(): 1}, context(workspace))
    assert not step.is_sent


def test_a_run_that_is_told_to_end_while_it_fails_is_not_started_again(workspace):
    first = submitted(workspace)
    first.log.mkdir(exist_ok=True)
    # The command ends with an error and tells its supervisor to end, in the same moment.
    words = [sys.executable, "-P", "-m", "jobs.supervisor.attempt", first.path, "--", "sh", "-c", "kill -TERM $PPID; exit 9"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    subprocess.run(words, env=environment, timeout=HANG_S, check=False)
    assert first.judge().state in ("failed", "cancelled")
    assert workspace.list_run_ids() == [first.run_id]


@pytest.mark.parametrize(
    ("state", "changed", "expected"),
    [
        ("failed", {}, "failed"),
        ("failed", {"retried": ["failed"]}, None),
        ("failed", {"retried": ["node_fail"]}, "failed"),
        ("node_fail", {"retried": ["node_fail"]}, "node_fail"),
        ("node_fail", {"retried": ["node_fail", "failed", "node_fail"]}, None),
        ("oom", {}, None),
        ("oom", {"retry": Retry(oom=1)}, "oom"),
        ("oom", {"retry": Retry(oom=1), "cell": msgspec.structs.replace(CELL, expect=["oom"])}, None),
        ("cancelled", {"retry": Retry(100, 100, 100, 100, 100, 100)}, None),
        ("told", {"retry": Retry(100, 100, 100, 100, 100, 100)}, None),
        ("hung", {}, None),
        ("preempted", {}, None),
        ("timeout", {"retry": Retry(timeout=1)}, None),  # no checkpoint: another start would repeat the same steps
    ],
)
def test_a_run_is_started_again_within_the_budget_of_its_state(workspace, state, changed, expected):
    folder = submitted(workspace)
    folder.write_event("attempt", "started")
    run = msgspec.structs.replace(folder.read_run(), **changed)
    assert retry_budget.find_retry_state(folder, run, end(state), saved_step=0) == expected


def test_only_one_process_can_make_the_next_attempt(workspace):
    """A second process that queues the same next attempt gets an error and changes nothing."""
    first = submitted(workspace)
    assert retries.queue_next(first, first.read_run(), "failed") == ""
    second = attempt(workspace, 2)
    before = second.run_json.read_bytes(), second.read_events()
    assert "was submitted already" in retries.queue_next(first, first.read_run(), "failed")
    assert (second.run_json.read_bytes(), second.read_events()) == before
    assert workspace.list_run_ids() == [first.run_id, second.run_id]


def test_the_runner_may_start_the_next_attempt_in_a_trusted_workspace(workspace, tmp_path):
    theirs = Workspace(shutil.copytree(workspace.path, tmp_path / "theirs"))
    workspace_trust.store_consent(theirs, print)
    first = submitted(theirs)
    assert retries.queue_next(first, first.read_run(), "failed") == ""
    assert [folder.run_id for folder in RunQueue("local", theirs).list_startable_runs()] == [attempt(theirs, 2).run_id]


def test_the_status_shows_the_number_of_the_retry(workspace):
    first = submitted(workspace)
    retries.queue_next(first, first.read_run(), "node_fail")
    first.write_event("attempt", "exited", **end("node_fail"))
    (shown,) = read_statuses(workspace, [attempt(workspace, 2)])
    assert (shown.state, shown.why) == ("pending", "attempt 2 after node_fail (retry 1 of 2)")
    assert (shown.retried, shown.retries_allowed) == (["node_fail"], {"failed": 1, "node_fail": 2})


@pytest.mark.parametrize(("state", "send"), [("node_fail", True), ("oom", False), ("cancelled", False)])
def test_the_next_submission_retries_a_run_whose_supervisor_was_lost(workspace, state, send):
    first = submitted(workspace)
    first.claim.mkdir()
    first.write_event("attempt", "started")
    first.write_event("queue", "exited", **end(state))
    (step,) = submit.decide_runs(workspace, [CELL], {CELL.name(): 1}, context(workspace))
    assert step.is_sent is send
    assert (step.run.attempt, step.run.retried) == ((2, ["node_fail"]) if send else (1, []))


def test_an_attempt_by_jobs_retry_has_the_full_budget_of_retries(workspace):
    """An attempt by `jobs retry` may be retried automatically as often as the first attempt."""
    first = submitted(workspace, retried=["failed"])
    first.claim.mkdir()
    first.write_event("attempt", "started")
    first.write_event("attempt", "exited", **end("failed"))
    now = read_statuses(workspace, [first])
    (step,) = submit.decide_retries(workspace, now, {"failed"}, context(workspace, retry=Retry()))
    assert (step.run.retry, step.run.retried) == (Retry(failed=1, node_fail=2), [])


def test_cancelling_a_run_cancels_its_queued_next_attempt(workspace):
    first = submitted(workspace)
    first.claim.mkdir()
    now = read_statuses(workspace, [first])
    retries.queue_next(first, first.read_run(), "failed")
    first.write_event("attempt", "exited", **end("failed"))
    assert {run.id: run.state for run in watch.cancel_runs(workspace, now)} == {
        first.run_id: "failed",
        attempt(workspace, 2).run_id: "cancelled",
    }


# Jobs of Slurm: the supervisor in a process of its own, and a stand-in for scontrol that writes its arguments down.


@pytest.fixture
def in_slurm(tmp_path):
    """A function that runs the supervisor of a run in a job of Slurm, and returns the supervisor's calls of `scontrol`."""
    folder = RunDir(tmp_path / "runs" / "a-r1")
    folder.log.mkdir(parents=True)
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\ncase $1 in update|requeue) echo "$*" >> {tmp_path}/calls;; esac\n')
    (tmp_path / "scontrol").chmod(0o755)

    def start(command, restarts, retry, requeues=0):
        run = Run(
            schema=1, run_id="a-r1", matrix="m", cell=CELL, cell_hash=CELL.hash(), repeat=1, attempt=1, launcher="torchrun",
            rehearsal=False, world=World(1, 2, 2), cluster={}, data_path="", versions={}, git_commit=None, templates={},
            created="", scheduler="slurm", requeues=requeues, retry=retry,
        )  # fmt: skip
        files.write_json(folder.run_json, run)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
        words = [sys.executable, "-P", "-m", "jobs.supervisor.attempt", folder.path, "--", "sh", "-c", command]
        start.ended = subprocess.run(words, env=environment, timeout=HANG_S, check=False)
        calls = tmp_path / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    start.folder = folder
    return start


def test_a_supervisor_requeues_a_failed_run_once(in_slurm):
    requeued = ["update JobId=7 Requeue=1", "requeue 7"]
    assert in_slurm("exit 9", 0, Retry(failed=1)) == requeued
    assert in_slurm("exit 9", 1, Retry(failed=1)) == requeued  # the calls of the first start
    events = in_slurm.folder.read_events()
    assert [event.event for event in events if event.event != "rendered"] == [
        "started",
        "exited",
        "requeued",
        "started",
        "exited",
    ]
    assert events[2].data == {"after": "failed", "why": "retry 1 of 1 after failed"}
    assert retry_budget.list_retried_states(in_slurm.folder.read_run(), events) == ["failed"]


def test_a_supervisor_does_not_requeue_a_run_that_was_told_to_end(in_slurm):
    assert in_slurm("kill -TERM $PPID; exit 9", 0, Retry(failed=9, hung=9), requeues=9) == []


def test_a_requeued_packed_allocation_starts_no_further_run_before_slurm_ends_it(in_slurm, tmp_path):
    """A supervisor that requeued a job of several runs waits until Slurm ends it, so that the next run does not start."""
    in_slurm.folder.write_event("controller", "submitted", scheduler="slurm", job="7", kind="pack")
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$1" = requeue ] && kill $PPID || true\n')
    in_slurm("exit 9", 0, Retry(failed=1))
    assert in_slurm.ended.returncode == -signal.SIGTERM


def restarted(folder, monkeypatch, state, **sent):
    """Whether a restarted job of Slurm starts a run again that ended in this state."""
    folder.write_event("controller", "submitted", scheduler="slurm", job="7", **sent)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert claim.claim_run(folder) == "first"
    folder.write_event("attempt", "started")
    folder.write_event("attempt", "exited", **end(state))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    return claim.claim_run(folder) == "again"


@pytest.mark.parametrize(
    ("state", "sent", "taken"),
    [
        ("oom", {}, False),
        ("hung", {}, False),
        ("timeout", {}, False),
        ("failed", {}, True),  # a node that soon fails may have caused this
        ("failed", {"kind": "pack"}, False),  # another run of the job was started again
        ("told", {"kind": "pack"}, True),
    ],
)
def test_a_restarted_job_does_not_claim_a_run_that_ended_by_itself(workspace, monkeypatch, state, sent, taken):
    """A restarted job does not start a run again that ended as `oom`, `hung` or `timeout`."""
    assert restarted(submitted(workspace), monkeypatch, state, **sent) is taken


def test_a_restarted_job_claims_the_run_whose_supervisor_asked_for_the_restart(workspace, monkeypatch):
    folder = submitted(workspace)
    assert not restarted(folder, monkeypatch, "oom")
    folder.write_event("attempt", "requeued", after="oom", why="")
    assert claim.claim_run(folder) == "again"


SLURM = "schema: 1\nname: c\nprovider: slurm\nslurm: {{requeue: {}}}\nstorage: {{shared: /s}}\n"


@pytest.mark.parametrize(
    ("requeue", "retry", "of_node", "of_timeout", "word"),
    [
        (2, Retry(), 2, 2, "--requeue"),
        (0, Retry(failed=1), 0, 0, "--no-requeue"),
        (2, Retry(node_fail=0, preempted=0), 0, 2, "--no-requeue"),
        (0, Retry(preempted=3), 3, 0, "--requeue"),
    ],
)
def test_numbers_of_retries_default_to_those_of_the_cluster(workspace, requeue, retry, of_node, of_timeout, word):
    """The key `slurm.requeue` is the number of retries for states that the matrix does not name."""
    path = workspace.path / "cluster.yaml"
    path.write_text(SLURM.format(requeue))
    where = cluster.load_cluster(path)
    run = render.make_run(CELL, 1, 1, context(workspace, cluster=where, scheduler="slurm", retry=retry))
    assert (run.find_retry_limit("node_fail"), run.find_retry_limit("timeout")) == (of_node, of_timeout)
    assert run.find_retry_limit("preempted") == of_node  # a run cannot tell this from a lost node
    assert word in sbatch_options.list_sbatch_options(run, where)
    here = render.make_run(CELL, 1, 1, context(workspace, retry=Retry()))
    assert not here.may_be_retried


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("retry: {oom: 0, node_fail: 2, failed: 1}", None),
        ("retry: {completed: 1}", "m.yaml:4:9: retry.completed"),
        ("retry: {failed: 101}", "m.yaml:4:17: retry.failed"),
        ("retry: {failed: -1}", "m.yaml:4:17: retry.failed"),
        ("retry: {failed: 1}\nsearch: {key: gpu_batch_size, for: fastest}", "tries of a search are not started again"),
    ],
)
def test_a_matrix_with_an_unknown_state_or_number_of_retries_is_refused(tmp_path, text, words):
    path = tmp_path / "m.yaml"
    size = "" if "search" in text else "global_batch_size: 8, "
    path.write_text(f"schema: 1\nname: m\ndefaults: {{workload: gpt2-tiny, strategy: ddp, {size}steps: 3}}\n{text}\n")
    if words is None:
        assert matrix.load_matrix(path).file.retry == Retry(oom=0, node_fail=2, failed=1)
    else:
        with pytest.raises(InputError, match=re.escape(words)):
            matrix.load_matrix(path)
