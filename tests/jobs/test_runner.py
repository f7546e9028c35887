"""The runner, which starts the queued runs of this machine, with scripts of this test instead of rendered scripts."""

import fcntl
import subprocess
import sys
from socket import gethostname

import msgspec
import pytest
from support_cells import CELL
from support_e2e import HANG_S
from support_trust import make_own

from jobs import claim, run_queue
from jobs.scheduler import SubmitOptions
from jobs.schedulers import local
from jobs.supervisor import attempt
from shardlab.errors import WorkspaceError
from shardlab.files import files
from shardlab.runs.run import Run, World, make_run_id
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace


@pytest.fixture
def workspace(tmp_path):
    return make_own(tmp_path)


def submitted(workspace, repeat) -> RunDir:
    """Make a submitted run, whose script only prints that it ran."""
    folder = RunDir(workspace.runs / make_run_id(CELL, repeat))
    folder.path.mkdir(parents=True)
    run = Run(
        schema=1, run_id=folder.run_id, matrix="m", cell=CELL, cell_hash=CELL.hash(), repeat=repeat, attempt=1,
        launcher="torchrun", rehearsal=False, world=World(1, 2, 2), cluster={}, data_path="", versions={},
        git_commit=None, templates={}, created="",
    )  # fmt: skip
    files.write_json(folder.run_json, run)
    (folder.path / "job.sh").write_text("echo ran\n")
    folder.write_event("controller", "submitted")
    return folder


def runner(workspace) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-P", "-m", "jobs.schedulers.local", str(workspace.path)]
    return subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=False)


def output(folder) -> str | None:
    log = folder.log / "script.log"
    return log.read_text() if log.exists() else None


def test_the_runner_starts_waiting_runs_and_no_claimed_runs(workspace):
    """The runner starts a waiting run, and not a run that another machine has claimed."""
    waiting, claimed = submitted(workspace, 1), submitted(workspace, 2)
    claimed.claim.mkdir()
    claimed.write_event("attempt", "started")
    (started,) = (path for path in claimed.path.glob("events.*") if b'"started"' in path.read_bytes())
    started.write_bytes(started.read_bytes().replace(gethostname().encode(), b"another-machine"))
    done = runner(workspace)
    assert (done.returncode, done.stderr) == (0, "")
    assert (output(waiting), output(claimed)) == ("ran\n", None)
    assert "exited" in {event.event for event in waiting.read_events()}


def test_a_second_runner_starts_no_run(workspace):
    waiting = submitted(workspace, 1)
    lock = workspace.shardlab_folder / "local" / "runner.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert runner(workspace).returncode == 0
    assert output(waiting) is None


def test_an_unwritable_workspace_stops_the_runner_with_a_sentence(tmp_path):
    (tmp_path / ".shardlab").write_text("a file in the place of the folder")
    done = runner(Workspace(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("the runner stops: ")
    assert done.stderr.count("\n") == 1


def test_a_job_that_slurm_started_again_leaves_a_cancelled_run_alone(workspace, monkeypatch):
    folder, other = submitted(workspace, 1), submitted(workspace, 2)
    assert claim.claim_as_cancelled(folder)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert claim.claim_run(other) == "first"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert claim.claim_run(folder) is None
    assert claim.claim_run(other) == "again"
    assert claim.claim_run(other) is None


def test_records_of_an_earlier_start_are_moved_aside_unless_there_is_a_checkpoint(workspace, monkeypatch):
    folder = submitted(workspace, 1)
    folder.steps_file(0).parent.mkdir()
    folder.steps_file(0).write_bytes(b"steps\n")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    claim.move_earlier_records(folder)
    assert not folder.steps_file(0).parent.exists()
    moved = folder.path / "before-restart-1" / "steps" / folder.steps_file(0).name
    assert moved.read_bytes() == b"steps\n"
    assert sorted(path.name for path in (folder.path / "before-restart-1").iterdir()) == ["steps"]


def test_a_refusal_of_a_job_names_the_submission_that_it_refuses(workspace, monkeypatch, capsys):
    """The event `refused` has the name of the Slurm job as token of the refused submission."""
    folder = submitted(workspace, 1)
    files.write_json(folder.run_json, msgspec.structs.replace(folder.read_run(), source="/of other source", scheduler="slurm"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NAME", "m.0123456789")
    assert attempt.main([str(folder.path), "--", "true"]) == attempt.PACKAGES_CHANGED_CODE
    (refused,) = [event for event in folder.read_events() if event.event == "refused"]
    assert refused.data["token"] == "m.0123456789"
    assert "/of other source that the run was submitted with" in capsys.readouterr().err


def test_the_token_of_a_run_is_the_name_of_its_slurm_job_or_empty(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_JOB_NAME", "m.0123456789")
    assert claim.make_token_event_data() == {}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert claim.make_token_event_data() == {"token": "m.0123456789"}


def test_the_log_of_the_runner_is_not_written_through_a_link(workspace):
    """A workspace of another person may have a link to a file such as ~/.bashrc in place of the log."""
    victim = workspace.path / "bashrc"
    victim.write_text("mine")
    (workspace.shardlab_folder / "local").mkdir(parents=True)
    (workspace.shardlab_folder / "local" / "runner.log").symlink_to(victim)
    folder = submitted(workspace, 1)
    with pytest.raises(WorkspaceError, match=r"runner.log: it is a symlink"):
        local.SCHEDULER.submit(workspace, [folder], SubmitOptions())
    (folder.log).mkdir(exist_ok=True)
    (folder.log / "script.log").symlink_to(victim)
    with pytest.raises(OSError, match="it is a symlink"):
        run_queue.start_script(folder)
    assert victim.read_text() == "mine"
