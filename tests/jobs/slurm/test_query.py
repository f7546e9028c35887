"""shardlab queries Slurm once for all runs. It queries Slurm a second time only if the first answer does not determine the
state of every run."""

import pytest

from jobs.slurm import query

AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


class Slurm:
    """Stand-ins for Slurm's commands on PATH. Each prints the lines that the test gives it, and records that it was called."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("sacct", "squeue", "scontrol"):
            self.says(name)

    def says(self, name, *lines, code=0, error=""):
        (self.folder / f"{name}.out").write_text("".join(f"{line}\n" for line in lines))
        script = self.folder / name
        script.write_text(f'#!/bin/sh\necho {name} >>"{self.folder}/calls"\ncat "$0.out"\necho "{error}" >&2\nexit {code}\n')
        script.chmod(0o755)

    def calls(self):
        log = self.folder / "calls"
        return log.read_text().split() if log.exists() else []


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return Slurm(tmp_path)


def listed(what, job, state):
    """Returns the line that sacct or squeue prints for a job in this state, with the columns that `jobs.slurm.query` asks
    for."""
    names = query.SACCT_FIELDS if what == "sacct" else query.SQUEUE_FORMAT.split("|")
    known = {"JobID": job, "%i": job, "JobName": "sweep.1", "%j": "sweep.1", "State": state, "%T": state}
    return "|".join(known.get(name, "None") for name in names)


def test_ended_runs_are_looked_up_with_sacct(stand_in):
    stand_in.says("sacct", *(listed("sacct", f"7_{task}", "COMPLETED") for task in range(1000)))
    found = query.find_jobs(["7"], 0.0)
    assert (len(found.jobs), found.complete, stand_in.calls()) == (1000, True, ["sacct"])


def test_running_runs_are_looked_up_only_with_squeue(stand_in):
    """If squeue lists all jobs, sacct is not called."""
    stand_in.says("squeue", listed("squeue", "7_998", "RUNNING"), listed("squeue", "7_[999-1000]", "PENDING"))
    found = query.find_jobs(["7"], 0.0, {"7_998", "7_999", "7_1000"})
    assert {job: one.state for job, one in found.jobs.items()} == {
        "7_998": "RUNNING", "7_999": "PENDING", "7_1000": "PENDING",
    }  # fmt: skip
    assert (found.complete, stand_in.calls()) == (True, ["squeue"])


def test_jobs_that_squeue_does_not_list_are_looked_up_with_sacct(stand_in):
    """sacct is called for jobs that squeue does not list any more. For other jobs, squeue decides."""
    stand_in.says("squeue", listed("squeue", "7_1", "RUNNING"))
    stand_in.says("sacct", listed("sacct", "7_0", "NODE_FAIL"), listed("sacct", "7_1", "PENDING"))
    found = query.find_jobs(["7"], 0.0, {"7_0", "7_1"})
    assert {job: one.state for job, one in found.jobs.items()} == {"7_0": "NODE_FAIL", "7_1": "RUNNING"}
    assert (found.complete, stand_in.calls()) == (True, ["squeue", "sacct"])


def test_sacct_output_with_an_error_and_exit_code_0_is_incomplete(stand_in):
    """sacct may exit with 0 although it prints an error. Its answer is then incomplete."""
    stand_in.says("sacct", error="sacct: error: slurm_persist_conn_open: Something happened with the receiving of a response")
    assert query.find_jobs(["7"], 0.0).complete is False
    stand_in.says("sacct")
    assert query.find_jobs(["7"], 0.0).complete is True


def test_of_two_arrays_with_the_same_job_number_the_later_counts(stand_in):
    """If sacct lists two arrays with the same job number, the array that was submitted later counts."""
    stand_in.says("sacct", "7_3|old.1|FAILED|1700000000|0|n|None", "7_[0-9]|new.1|PENDING|1800000000|Unknown||None")
    stand_in.says("squeue", code=1, error=AWAY)
    assert query.find_jobs(["7"], 0.0).jobs["7_3"].name == "new.1"


def test_an_unreachable_controller_is_reported_and_sacct_is_used(stand_in):
    stand_in.says("squeue", code=1, error=AWAY)
    stand_in.says("sacct", listed("sacct", "7_1", "RUNNING"))
    found = query.find_jobs(["7"], 0.0, {"7_1"})
    assert (found.jobs["7_1"].state, found.complete, stand_in.calls()) == ("RUNNING", False, ["squeue", "sacct"])
    assert "connect failure" in found.no_answer_reason


def test_a_requeueable_end_in_sacct_is_looked_up_with_squeue(stand_in):
    """Slurm may restart a job that sacct lists as PREEMPTED or NODE_FAIL, so squeue is called too."""
    stand_in.says("sacct", listed("sacct", "7", "PREEMPTED"), listed("sacct", "8", "NODE_FAIL"), listed("sacct", "9", "FAILED"))
    stand_in.says("squeue", listed("squeue", "7", "PENDING"))
    found = query.find_jobs(["7", "8", "9"], 0.0)
    assert {job: one.state for job, one in found.jobs.items()} == {"7": "PENDING", "8": "NODE_FAIL", "9": "FAILED"}
    assert (found.complete, stand_in.calls()) == (True, ["sacct", "squeue"])
