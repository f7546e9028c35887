"""If a limit of Slurm rejects jobs, shardlab submits their runs later, when Slurm accepts jobs again. Each run is submitted
once, in arrays that fit into the limit, with as few calls of sbatch as possible."""

import itertools
import json
import re
from argparse import Namespace
from typing import ClassVar

import pytest
from support_queue import Queue, Study

from jobs.scheduler import SubmitOptions
from jobs.schedulers import slurm
from jobs.slurm import query, submission
from jobs.slurm.commands import SlurmOutput
from jobs.status import reconcile
from jobs.submission import backlog
from jobs.verbs import watch
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("source_copied_faster")
FAILED = "Batch job submission failed: "
REFUSED = f"sbatch: error: {FAILED}"
POLICY = f"{REFUSED}Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
BUSY = "Slurm temporarily unable to accept job, sleeping and retrying"
LATER = {
    "AssocMaxSubmitJobLimit": f"sbatch: error: AssocMaxSubmitJobLimit\n{POLICY}",
    "AssocGrpSubmitJobsLimit": f"sbatch: error: AssocGrpSubmitJobsLimit\n{POLICY}",
    "QOSMaxSubmitJobPerUserLimit": f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{POLICY}",
    "QOSGrpSubmitJobsLimit": f"sbatch: error: QOSGrpSubmitJobsLimit\n{POLICY}",
    "MaxSubmitJobsPerAccount": f"sbatch: error: MaxSubmitJobsPerAccount\n{POLICY}",
    BUSY: f"sbatch: error: {BUSY}\n{REFUSED}Resource temporarily unavailable",
    "Slurm job queue full, sleeping and retrying": "sbatch: error: Slurm job queue full, sleeping and retrying",
    f"{FAILED}MaxJobCount limit reached": f"{REFUSED}MaxJobCount limit reached",
    f"{FAILED}Rate limit exceeded, please retry later": f"{REFUSED}Rate limit exceeded, please retry later",
    f"{FAILED}Invalid job array specification": f"{REFUSED}Invalid job array specification",
}
NEVER = [
    f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{POLICY}",
    f"sbatch: error: AssocGrpGRES\n{POLICY}",
    f"{REFUSED}Invalid account or account/partition combination specified",
    f"{REFUSED}Requested node configuration is not available",
    f"{REFUSED}Requested time limit is invalid (missing or exceeds some limit)",
]
MAX_SUBMIT = {"says": [LATER["AssocMaxSubmitJobLimit"]]}


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """A fake Slurm with a queue. shardlab polls it without a pause."""
    monkeypatch.setattr(slurm.SlurmScheduler, "POLL_S", 0.0)
    return Queue(tmp_path / "slurm", monkeypatch)


def sizes(queue):
    """Returns how many runs each call of sbatch submitted."""
    found = [re.search(r"--array=0-(\d+)", " ".join(words)) for words in queue.calls("sbatch")]
    return [int(match[1]) + 1 if match else 1 for match in found]


def refusal(tmp_path, queue, says, runs=("r1",)):
    """Returns the error that `submission.send_submission` raises if sbatch rejects the job with the message `says`."""
    queue.rule(places=0, says=says.split("\n"))
    workspace = Workspace(tmp_path / "w")
    for run in runs:
        (workspace.runs / run).mkdir(parents=True)
    kind = "one" if len(runs) == 1 else "pack"
    one = submission.Submission(token="r1.0123456789", kind=kind, runs=[*runs], script="job.sbatch", options=[], created_s=0.0)
    submission.record_intent(workspace, one)
    with pytest.raises(submission.JobRefused) as refused:
        submission.send_submission(workspace, one)
    assert queue.state()["last"] == 0
    return refused.value


@pytest.mark.parametrize("word", LATER)
def test_an_error_of_a_temporary_limit_raises_no_room(tmp_path, queue, word):
    """With each error message in LATER, Slurm may accept the job later, so `submission.send_submission` raises
    SlurmLimitReached."""
    answer = SlurmOutput(1, "", LATER[word])
    assert not query.is_unanswered(answer)
    assert refusal(tmp_path, queue, LATER[word]).why == word


@pytest.mark.parametrize("text", NEVER)
def test_an_error_of_a_permanent_limit_is_a_rejection(tmp_path, queue, text):
    """With each error message in NEVER, Slurm rejects the job for good, so the error is not SlurmLimitReached."""
    refused = refusal(tmp_path, queue, text)
    assert not isinstance(refused, submission.SlurmLimitReached)
    assert "Slurm rejected the job of r1: " in str(refused)


def test_a_rejected_job_of_several_runs_is_named_by_all_of_them(tmp_path, queue):
    assert "Slurm rejected the job of r1, r2, r3: " in str(refusal(tmp_path, queue, NEVER[0], ("r1", "r2", "r3")))


@pytest.mark.parametrize("word", ["AssocMaxSubmitJobLimit", BUSY])
def test_a_waiting_command_submits_each_run_once(tmp_path, queue, word, capsys):
    queue.rule(places=5, ends=2, says=[LATER[word]])
    study = Study(tmp_path, 23)
    assert study.jobs("submit", "--wait") == 0
    assert study.times_sent() == {(1, 1)}
    assert len(study.states()) == 23
    assert queue.state()["most"] == 5
    assert sizes(queue)[:4] == [23, 5, 5, 1]
    said = capsys.readouterr()
    assert "5 run(s) submitted, 18 wait for room, 0 skipped" in said.out
    assert f"Slurm accepts no more jobs for now ({word})" in said.err
    assert "not submitted" not in said.err


def test_a_full_queue_gets_as_many_runs_as_have_ended(tmp_path, queue):
    queue.rule(places=16, ends=8, **MAX_SUBMIT)
    study = Study(tmp_path, 64)
    assert study.jobs("submit", "--wait") == 0
    calls, looks = sizes(queue), queue.state()["looks"]
    first, later = calls[:5], calls[5:]
    assert first == [64, 16, 16, 4, 1]
    assert later.count(8) >= 4
    assert len(later) <= 2 * looks


def test_a_command_that_does_not_wait_names_the_rest_and_a_second_call_sends_it(tmp_path, queue, capsys):
    queue.rule(places=5, **MAX_SUBMIT)
    study = Study(tmp_path, 7)
    assert study.jobs("submit") == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: Slurm accepts no more jobs for now (AssocMaxSubmitJobLimit): 2 run(s) are not submitted")
    assert sorted(study.states()) == ["pending"] * 5 + ["planned"] * 2
    assert study.jobs("status") == 0
    assert study.jobs("submit", "--wait") == 0
    assert study.times_sent() == {(1, 1)}


def test_attempts_that_a_retry_had_no_room_for_go_with_the_next(tmp_path, queue):
    study = Study(tmp_path, 3)
    assert study.jobs("submit", "--wait") == 0
    queue.rule(places=1, **MAX_SUBMIT)
    assert study.jobs("retry", "--only", "oom") == 1
    assert sorted(study.states()) == ["oom"] * 3 + ["pending"] + ["planned"] * 2
    queue.rule(places=1, ends=1, **MAX_SUBMIT)
    assert study.jobs("retry", "--only", "oom", "--wait") == 0
    assert study.times_sent() == {(1, 1)}
    queue.rule(places=0, **MAX_SUBMIT)
    assert study.jobs("retry", "--only", "oom") == 1
    queue.rule()
    assert study.jobs("submit", "--wait") == 0
    assert study.times_sent() == {(1, 1)}


def test_an_array_larger_than_the_limit_of_slurm_is_split(tmp_path, queue):
    queue.rule(largest_array=3, says_largest_array=10)
    study = Study(tmp_path, 20)
    assert study.jobs("submit", "--wait") == 0
    assert study.times_sent() == {(1, 1)}
    assert sizes(queue) == [10, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]


def test_runs_are_submitted_one_by_one_if_arrays_are_switched_off(tmp_path, queue):
    queue.rule(largest_array=1, says_largest_array=0)
    study = Study(tmp_path, 3)
    assert study.jobs("submit", "--wait") == 0
    assert sizes(queue) == [1, 1, 1]


def test_max_parallel_limits_the_runs_of_a_split_submission(tmp_path, queue):
    """With --max-parallel 2, at most two runs run at a time, also when a limit of Slurm splits the submission."""
    queue.rule(places=6, ends=1, **MAX_SUBMIT)
    study = Study(tmp_path, 12)
    assert study.jobs("submit", "--wait", "--max-parallel", "2") == 0
    assert study.times_sent() == {(1, 1)}
    arrays = [" ".join(words) for words in queue.calls("sbatch")]
    assert "--array=0-2%2" in arrays[1]
    later = [words for words in arrays if "%2" not in words and "--dependency" not in words]
    assert len(later) >= 5
    assert not [words for words in later if "--array=0-2" in words]


def test_a_run_submitted_after_a_reading_of_states_is_read_again(tmp_path, monkeypatch, capsys):
    """A run that was sent after `jobs` read its state is not final in that reading, so `jobs` reads its state again."""

    class Last:  # a stand-in for a Backlog with one waiting run, which Slurm accepts at the first attempt
        folders: ClassVar = ["r"]
        unanswered = None

        def __bool__(self):
            return bool(self.folders)

        def submit_more_runs(self, _found):
            self.folders.clear()

        def list_unsent_runs(self):
            return []

    states = iter(["planned", "planned", "completed"])

    def look():
        unknown = dict.fromkeys(
            (
                "cell",
                "step",
                "steps",
                "throughput",
                "unit",
                "eta_s",
                "started",
                "ended",
                "duration_s",
                "attempt",
                "repeat",
                "rehearsal",
            ),
            None,
        )
        return [
            reconcile.Status(
                id="r", state=next(states), why="", scheduler={"name": "slurm"}, hosts=[], expected=True, **unknown
            )
        ]

    out = Output.from_arguments(Namespace(json=True, quiet=False))
    monkeypatch.setattr(slurm.SlurmScheduler, "POLL_S", 0.0)
    monkeypatch.setattr(watch, "read_statuses", lambda *_: look())
    assert watch.wait_and_report(out, Workspace(tmp_path), [], wait=True, backlog=Last()) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["state"] == "completed"


def test_ctrl_c_ends_the_watching_and_names_the_unsent_runs(tmp_path, queue, capsys):
    queue.rule(places=4, ends=0, interrupts_at=2, **MAX_SUBMIT)
    study = Study(tmp_path, 6)
    assert study.jobs("submit", "--wait") == 130
    said = capsys.readouterr().err
    assert re.search(r"2 run\(s\) are not submitted \(AssocMaxSubmitJobLimit\): single-\S+, single-\S+\. Run the same", said)
    assert "interrupted; runs that were started continue" in said
    assert "None" not in said  # Slurm answered every call, so there is no unanswered submission to print
    queue.rule()
    assert study.jobs("submit", "--wait") == 0
    assert study.times_sent() == {(1, 1)}


def test_a_permanently_rejected_run_is_reported_and_the_others_are_awaited(tmp_path, queue, capsys):
    """One of four runs is always rejected: its error is printed, and the other three runs are submitted and waited for."""
    queue.rule(places=2, ends=1, **MAX_SUBMIT)
    study = Study(tmp_path, 4)
    assert study.jobs("render", "--matrix", str(study.matrix)) == 0
    never = [folder.run_id for folder in study.workspace.list_run_dirs() if folder.read_run().cell.seed == 3]
    queue.rule(places=2, ends=1, never=never, **MAX_SUBMIT)
    assert study.jobs("submit", "--wait") == 1
    said = capsys.readouterr().err
    assert "Invalid account or account/partition combination specified" in said
    assert sorted(study.states()) == ["oom"] * 3 + ["planned"]


def test_sbatch_is_ended_while_it_retries_by_itself(tmp_path, queue):
    """sbatch reports a temporary error and tries again by itself. `jobs` ends it, so that it submits nothing later."""
    sbatch = queue.folder / "sbatch"
    sbatch.rename(queue.folder / "later")
    sbatch.write_text(f'#!/bin/sh\necho "sbatch: error: {BUSY}" >&2\nsleep 20\nexec "${{0%/*}}/later" "$@"\n')
    sbatch.chmod(0o755)
    study = Study(tmp_path, 1)
    assert study.jobs("submit") == 1
    assert study.states() == ["planned"]
    assert queue.state()["last"] == 0


def test_a_run_cancelled_meanwhile_is_neither_submitted_nor_awaited(tmp_path, queue):
    queue.rule(places=0, **MAX_SUBMIT)
    study = Study(tmp_path, 3)
    assert study.jobs("submit") == 1
    waiting = backlog.Backlog(
        study.workspace, "slurm", SubmitOptions(), backlog.SchedulerFull("Slurm", "full", study.workspace.list_run_dirs())
    )
    queue.rule(ends=0)
    assert study.jobs("cancel", "--all") == 0
    waiting.submit_more_runs(study.statuses())
    assert not waiting
    assert queue.state()["last"] == 0


def test_an_unreachable_slurm_is_awaited(tmp_path, queue):
    queue.rule(places=0, **MAX_SUBMIT)
    study = Study(tmp_path, 3)
    assert study.jobs("submit") == 1
    waiting = backlog.Backlog(
        study.workspace, "slurm", SubmitOptions(), backlog.SchedulerFull("Slurm", "full", study.workspace.list_run_dirs())
    )
    before = study.statuses()
    queue.rule(away=True)
    waiting.submit_more_runs(before)
    assert "Unable to contact slurm controller" in waiting.problem
    # Slurm did not answer the submission of one run. This run stays pending until its outcome is known.
    assert sorted(study.states()) == ["pending", "planned", "planned"]
    while waiting:
        queue.rule(ends=0)
        waiting.submit_more_runs(study.statuses())
    assert study.states() == ["pending"] * 3
    queue.rule()
    assert study.jobs("submit", "--wait") == 0
    assert study.times_sent() == {(1, 1)}


def test_the_pause_between_rejected_submissions_grows(tmp_path, queue, monkeypatch):
    """While Slurm keeps rejecting jobs, the pause between two attempts doubles from 10 s to at most 600 s."""
    now = [0.0]
    monkeypatch.setattr(backlog.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(slurm.SlurmScheduler, "POLL_S", 5.0)
    queue.rule(places=0, **MAX_SUBMIT)
    study = Study(tmp_path, 2)
    assert study.jobs("submit") == 1
    folders = study.workspace.list_run_dirs()
    waiting = backlog.Backlog(study.workspace, "slurm", SubmitOptions(), backlog.SchedulerFull("Slurm", "full", folders))
    before_any, before, tried = study.statuses(), len(sizes(queue)), []
    while now[0] < 3600:
        now[0] += 5
        waiting.submit_more_runs(before_any)
        if len(sizes(queue)) > before:
            before = len(sizes(queue))
            tried.append(now[0])
    assert [later - earlier for earlier, later in itertools.pairwise(tried)] == [10, 20, 40, 80, 160, 320, 600, 600, 600, 600]
    assert not list(submission.find_submissions_folder(study.workspace).iterdir())


@pytest.mark.parametrize("words", [[], ["--only", "held"]])
def test_a_retry_releases_runs_whose_jobs_slurm_holds_after_a_failed_start(tmp_path, queue, words):
    queue.rule(ends=0, reason="launch failed requeued held")
    study = Study(tmp_path, 2)
    assert study.jobs("submit", "--wait") == 1  # the command does not wait for runs that only a person can release
    before = [folder.run_json.read_bytes() for folder in study.workspace.list_run_dirs()]
    assert study.jobs("retry", *words) == 0
    assert ["release", "1_0,1_1"] in queue.calls("scontrol")
    assert [folder.run_json.read_bytes() for folder in study.workspace.list_run_dirs()] == before
    assert study.times_sent() == {(1, 0)}
    queue.rule(ends=0, reason="JobHeldUser")
    assert study.jobs("retry", *words) == 0
    assert sum(words[0] == "release" for words in queue.calls("scontrol")) == 1
