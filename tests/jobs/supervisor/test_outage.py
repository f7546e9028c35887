"""While Slurm's controller is down, a job step that ended waits for the controller (since Slurm 26.05).

Meanwhile the supervisor of the run does not record that the run hangs or exceeded its time limit.
"""

import os

import pytest
from support_clock import Clock

from jobs.node import hang_detection
from jobs.node.hang_detection import HangWatch
from jobs.slurm import commands
from jobs.supervisor.attempt import AttemptSupervisor
from shardlab.runs.rundir import RunDir
from tests.jobs.supervisor.test_jobs_attempt import write_run

OVER, LATER = float("-inf"), float("inf")  # deadlines of a run: OVER has passed, LATER never passes


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (hang_detection, commands):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def controller(tmp_path, monkeypatch):
    """The file with the answer of `scontrol ping`, which a stand-in for scontrol prints."""
    answer = tmp_path / "answer"
    answer.write_text("Slurmctld(primary) at head is UP\n")
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat {answer}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return answer


@pytest.fixture
def attempt(tmp_path):
    folder = RunDir(tmp_path / "runs" / "a-r1")
    folder.log.mkdir(parents=True)
    write_run(folder, scheduler="slurm")
    return AttemptSupervisor(folder, ["true"])


def away(controller):
    controller.write_text("Slurmctld(primary) at head is DOWN\n")


def back(controller):
    controller.write_text("Slurmctld(primary) at head is UP\n")


def still(attempt, clock, seconds=100):
    """Let seconds pass in which no file of the run changes. Returns the supervisor's reason to end the run, or None."""
    progress = HangWatch(attempt.run_dir, 10)
    for _ in range(seconds):
        clock.now += 1.0
        if (reason := attempt._find_end_reason(LATER, progress)) is not None:
            return reason
    return None


def test_a_run_hangs_only_while_the_controller_is_there(attempt, clock, controller):
    assert still(attempt, clock) == "hung"
    away(controller)
    assert still(attempt, clock) is None
    back(controller)
    assert still(attempt, clock, 50) is None  # after an outage, the job step has time to end
    assert still(attempt, clock) == "hung"


def test_a_run_whose_result_is_written_is_not_out_of_time_while_its_step_waits(attempt, clock, controller):
    progress = HangWatch(attempt.run_dir, 10)
    away(controller)
    assert attempt._find_end_reason(OVER, progress) == "timeout"  # no result yet, so its ranks are still running
    attempt.run_dir.result.write_text("{}")
    assert attempt._find_end_reason(OVER, progress) is None
    back(controller)
    clock.now += commands.RECOVERY_S + 1
    assert attempt._find_end_reason(OVER, progress) == "timeout"


def test_without_slurm_no_controller_is_asked(attempt, clock, controller):
    away(controller)
    attempt.is_in_slurm = False
    assert still(attempt, clock) == "hung"
