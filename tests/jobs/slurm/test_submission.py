"""Each run gets exactly one job, even if the answer of sbatch is lost, is empty, or contains more than a job number."""

import os
from pathlib import Path

import pytest
from support_queue import Queue, Study

from jobs.schedulers import slurm
from jobs.slurm import submission
from shardlab.files import files
from shardlab.runs.record import Result

pytestmark = pytest.mark.usefixtures("source_copied_faster")
RESULT = Result(schema=1, run_id="r", state="completed", rehearsal=True, steps=1, unit="tokens")
NOT_KNOWN = "It is not known whether Slurm accepted the job "


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm.SlurmScheduler, "POLL_S", 0.0)
    monkeypatch.setattr(submission, "SEARCH_INTERVAL_S", 0.0)
    return Queue(tmp_path / "slurm", monkeypatch)


def jobs_of(study):
    return {
        event.data.get("job")
        for run in study.workspace.list_run_dirs()
        for event in run.read_events()
        if event.event == "submitted"
    }


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [""],
        ["sbatch: site policy 7 applies", "NUMBER"],
        ["NUMBER", "Your group has used 93 % of its hours."],
        ["Submitted batch job NUMBER"],
        ["NUMBER;other cluster"],
    ],
)
def test_an_answer_without_a_plain_number_is_looked_into_and_the_job_adopted(tmp_path, queue, answers):
    queue.rule(answers=answers)
    study = Study(tmp_path, 1)
    assert study.jobs("submit") == 0
    assert jobs_of(study) == {"1"}
    assert len(queue.calls("sbatch")) == 1
    assert [one.job for one in submission.list_submissions(study.workspace)] == ["1"]


def test_the_number_of_a_federated_cluster_is_read(tmp_path, queue):
    queue.rule(answers=["NUMBER;east"], unreachable=["squeue"])
    study = Study(tmp_path, 1)
    assert study.jobs("submit") == 0
    assert jobs_of(study) == {"1"}


def test_a_submission_without_an_answer_of_slurm_is_unknown(tmp_path, queue, capsys):
    queue.rule(loses_answers=True, unreachable=["squeue", "sacct"])
    study = Study(tmp_path, 2)
    assert study.jobs("submit") == 1
    said = capsys.readouterr().err
    (one,) = submission.list_submissions(study.workspace)
    assert f"{NOT_KNOWN}{one.token} (2 runs: " in said
    assert "if it did, the job runs. When Slurm is back, `jobs submit` and `jobs retry` look for this job by its name" in said
    assert "othing was changed" not in said
    queue.rule()  # Slurm has accepted the job, and the runs of the job end
    assert study.jobs("submit", "--wait") == 0
    assert study.times_sent() == {(1, 1)}
    assert len(queue.calls("sbatch")) == 1


def test_the_first_three_of_many_runs_with_unknown_jobs_are_named(tmp_path, queue, capsys):
    queue.rule(loses_answers=True, unreachable=["squeue", "sacct"])
    study = Study(tmp_path, 4)
    assert study.jobs("submit") == 1
    (one,) = submission.list_submissions(study.workspace)
    assert f"{NOT_KNOWN}{one.token} (4 runs: {', '.join(one.runs[:3])}, ...)" in capsys.readouterr().err


def test_an_open_submission_is_unknown_while_slurm_is_unreachable(tmp_path, queue, capsys):
    """sbatch gave no answer, and Slurm then became unreachable. The next command submits nothing and the run stays pending."""
    queue.rule(loses_answers=True, unreachable=["squeue"])
    study = Study(tmp_path, 1)
    assert study.jobs("submit") == 1
    queue.rule(unreachable=["sbatch", "squeue", "sacct"])
    capsys.readouterr()
    assert study.jobs("submit") == 1
    assert NOT_KNOWN in capsys.readouterr().err
    assert study.states() == ["pending"]


def test_a_cancellation_without_slurm_is_reported_and_completed_by_the_next_one(tmp_path, queue, capsys):
    queue.rule(ends=0)
    study = Study(tmp_path, 1)
    assert study.jobs("submit") == 0
    queue.rule(ends=0, away=True)
    assert study.jobs("cancel", "--all") == 1
    said = capsys.readouterr().err
    assert "The runs are marked as cancelled in the workspace" in said
    assert study.states() == ["cancelled"]
    queue.rule(ends=0)
    assert study.jobs("cancel", "--all") == 0
    assert (
        "the run is cancelled, but its job 1 was still in the queue (PENDING); the job was cancelled."
        in capsys.readouterr().err
    )
    assert queue.state()["tasks"] == []


def test_a_submission_is_noted_as_sent_after_its_runs_are(tmp_path, queue, monkeypatch):
    study = Study(tmp_path, 2)

    rename = os.rename

    def interrupted(source, target):
        if "/submissions/" in str(target) and '"sent"' in Path(source).read_text():
            assert jobs_of(study) == {"1_0", "1_1"}
            assert [one.state for one in submission.list_submissions(study.workspace)] == ["intended"]
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    assert study.jobs("submit") == 130
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{queue.folder}{os.pathsep}{os.environ['PATH']}")
    assert study.jobs("submit", "--wait") == 0
    assert len(queue.calls("sbatch")) == 1


def test_slurms_commands_inherit_no_option_of_a_job_or_of_a_person(tmp_path, queue, monkeypatch):
    """Environment variables that change Slurm's commands, such as SBATCH_PARTITION, are removed. SLURM_CONF stays."""
    for name in ("SLURM_JOB_ID", "SBATCH_PARTITION", "SQUEUE_FORMAT", "SRUN_CPUS_PER_TASK", "SACCT_FORMAT", "SCANCEL_STATE"):
        monkeypatch.setenv(name, "of another job")
    monkeypatch.setenv("SLURM_CONF", "/etc/site/slurm.conf")
    study = Study(tmp_path, 1)
    assert study.jobs("submit", "--wait") == 0
    for command in ("sbatch", "squeue"):
        given = queue.environment(command)
        assert "of another job" not in given.values()
        assert given["SLURM_CONF"] == "/etc/site/slurm.conf"


def test_the_leftover_job_of_a_finished_run_is_cancelled_and_reported(tmp_path, queue, capsys):
    study = requeued_after_its_end(tmp_path, queue)
    (first,) = [
        run for run in study.workspace.list_run_dirs() if "1_0" in {event.data.get("job") for event in run.read_events()}
    ]
    assert study.jobs("status", first.run_id) == 0
    reason = "PENDING (launch failed requeued held)"
    assert (
        f"the run is completed, but its job 1_0 was still in the queue ({reason}); the job was cancelled."
        in capsys.readouterr().err
    )
    assert [task[0] for task in queue.state()["tasks"]] == ["1_1"]
    assert study.jobs("status", first.run_id) == 0
    assert "still in the queue" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [("submit",), ("submit", "--wait"), ("cancel", "--all"), ("status", "--watch"), ("retry",)])
def test_submit_cancel_and_status_cancel_leftover_jobs(tmp_path, queue, capsys, words):
    study = requeued_after_its_end(tmp_path, queue)
    assert study.jobs(*words) == 0
    said = capsys.readouterr()
    assert said.err.count("was still in the queue") == 2
    assert "nothing to cancel" not in said.out
    assert queue.state()["tasks"] == []
    assert len(queue.calls("sbatch")) == 1


def test_a_leftover_job_that_stays_is_an_error(tmp_path, queue, capsys):
    study = requeued_after_its_end(tmp_path, queue, unreachable=["scancel"])
    assert study.jobs("status") == 1
    assert "cancelling the job failed: Unable to contact slurm controller" in capsys.readouterr().err


def test_the_job_of_several_runs_is_left_while_one_of_them_has_not_ended(tmp_path, queue, capsys):
    study = requeued_after_its_end(tmp_path, queue, "--pack", ended=1)
    assert study.jobs("status") == 0
    assert "still in the queue" not in capsys.readouterr().err
    assert queue.state()["tasks"] != []
    end_well(study.workspace.list_run_dirs()[1])
    assert study.jobs("status") == 0
    assert queue.state()["tasks"] == []


def test_a_dry_run_cancels_no_leftover_job(tmp_path, queue):
    study = requeued_after_its_end(tmp_path, queue)
    assert study.jobs("submit", "--dry-run") == 0
    assert len(queue.state()["tasks"]) == 2


def requeued_after_its_end(tmp_path, queue, *words, ended=2, **rules):
    """Two runs share one job, and the first `ended` of them completed. Then Slurm requeues the job and holds it, so it does not
    start again."""
    study = Study(tmp_path, 2)
    queue.rule(ends=0)
    assert study.jobs("submit", *words) == 0
    for folder in study.workspace.list_run_dirs()[:ended]:
        end_well(folder)
    queue.rule(ends=0, reason="launch failed requeued held", **rules)
    return study


def end_well(folder):
    """Writes the records of a completed run with one step."""
    folder.claim.mkdir()
    folder.write_event("attempt", "started")
    files.write_json(folder.result, RESULT)
    folder.write_event("attempt", "exited", code=0, reason=None, steps=1)


@pytest.fixture
def lost(tmp_path, queue):
    """Three runs of one submission to which sbatch did not answer. Slurm has no job for them."""
    queue.rule(unreachable=["sbatch", "squeue", "sacct"])
    study = Study(tmp_path, 3)
    assert study.jobs("submit") == 1
    queue.rule(ends=0)
    return study


def test_a_cancelled_run_of_a_lost_submission_does_not_hold_the_others_back(lost, queue):
    cancelled, *others = lost.workspace.list_run_dirs()
    assert lost.jobs("cancel", cancelled.run_id) == 0
    queue.rule()
    assert lost.jobs("submit", "--wait") == 1
    assert [folder.judge().state for folder in (cancelled, *others)] == ["cancelled", "oom", "oom"]


def test_a_lost_submission_of_which_all_runs_were_cancelled_is_given_up(lost, queue, capsys):
    assert lost.jobs("cancel", "--all") == 0
    assert lost.jobs("submit") == 0
    assert "was not submitted, and none of its runs waits any more; the submission is dropped." in capsys.readouterr().err
    assert queue.state()["tasks"] == []
    assert submission.list_submissions(lost.workspace) == []


def test_runs_that_a_forgotten_job_did_not_reach_are_sent_again(lost, queue, capsys):
    first, *others = lost.workspace.list_run_dirs()
    first.claim.mkdir()
    first.write_event("attempt", "started")
    assert lost.jobs("submit") == 0
    assert "2 of its runs had not started; `jobs submit` submits them again." in capsys.readouterr().err
    assert len(queue.state()["tasks"]) == 2
    assert first.judge().state == "running"
    assert [folder.judge().state for folder in others] == ["pending", "pending"]
