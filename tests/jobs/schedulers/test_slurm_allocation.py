"""Tests of `jobs submit --in-allocation`: which nodes and GPUs shardlab finds in a Slurm allocation, and what it refuses."""

import os
import subprocess

import msgspec
import psutil
import pytest
from support_golden import run_of
from support_queue import Queue, Study

from jobs.rendering import render
from jobs.run_queue import Runner
from jobs.scheduler import SubmitOptions
from jobs.schedulers import allocation as in_allocation
from jobs.schedulers import slurm
from jobs.slurm import allocation
from jobs.slurm.allocation import Allocation
from shardlab.cluster.cluster import Cluster
from shardlab.cluster.slurm_keys import Slurm
from shardlab.errors import ShardlabError
from shardlab.files import files
from shardlab.hardware import host
from shardlab.runs.rundir import RunDir

pytestmark = pytest.mark.usefixtures("source_copied_faster")
JOB = "JobId=7 JobName=interactive NumNodes=2 NumCPUs=8 TRES=cpu=8,mem=2G,node=2,billing=8,gres/gpu=4,gres/gpu:a100=4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (JOB, Allocation(2, 2)),
        (JOB.replace("TRES=", "ReqTRES=cpu=1,gres/gpu=8 AllocTRES="), Allocation(2, 2)),
        ("JobId=7 NumNodes=1 TRES=cpu=2,node=1", Allocation(1, 0)),
        ("JobId=7 NumNodes=0", None),
        ("slurm_load_jobs error: Invalid job id specified", None),
    ],
)
def test_the_output_of_scontrol_about_an_allocation_is_parsed(text, expected):
    assert allocation.parse_allocation(text) == expected


def test_in_allocation_is_refused_outside_of_a_job_and_with_options_of_sbatch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slurm.SlurmScheduler, "POLL_S", 0.0)
    queue, study = Queue(tmp_path / "slurm", monkeypatch), Study(tmp_path, 1)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert study.jobs("submit", "--in-allocation") == 2
    assert "this process is in no job of Slurm (SLURM_JOB_ID is not set)" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert study.jobs("submit", "--in-allocation") == 2
    assert "Slurm does not say what the job 7 has" in capsys.readouterr().err
    monkeypatch.setattr(allocation, "read_own_allocation", lambda: Allocation(1, 0))
    assert study.jobs("submit", "--in-allocation", "--pack") == 2
    assert "--pack: not with --in-allocation" in capsys.readouterr().err
    assert (queue.calls("sbatch"), study.workspace.runs.exists()) == ([], False)


def test_the_script_in_an_allocation_is_a_step_without_sbatch_options(tmp_path):
    """The script of a run inside an allocation calls srun and has no `#SBATCH` lines."""
    run = msgspec.structs.replace(run_of("torchrun"), scheduler="allocation")
    text = render.render_script(run, tmp_path, Cluster(schema=1, name="c", provider="slurm", slurm=Slurm()), None)
    assert "#SBATCH" not in text
    assert "\n  srun \\\n" in text
    assert "--overlap" in text


def test_runs_that_wait_when_their_allocation_ends_are_given_back(tmp_path, monkeypatch):
    """The allocation ends during the first of three runs. The other two runs are not started, and they become `planned`
    again."""
    study = Study(tmp_path, 3)
    programs = tmp_path / "programs"
    programs.mkdir()
    answer = programs / "answer"
    answer.write_text(f"{JOB} JobState=RUNNING")
    (programs / "scontrol").write_text(f"#!/bin/sh\ncat {answer}\n")
    (programs / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    folders = [RunDir(study.workspace.runs / f"r{number}") for number in range(3)]
    for folder in folders:
        folder.log.mkdir(parents=True)
        run = msgspec.structs.replace(run_of("torchrun"), run_id=folder.run_id, scheduler="allocation")
        files.write_json(folder.run_json, run)
        (folder.path / "job.sh").write_text(
            f"sed -i s/RUNNING/COMPLETING/ {answer}; echo {folder.run_id} >> {programs}/started\n"
        )
        folder.write_event("controller", "submitted", scheduler="allocation")
    assert in_allocation.SCHEDULER.work_as_runner(study.workspace) == 0
    assert (programs / "started").read_text() == "r0\n"
    verdicts = [folder.judge() for folder in folders]
    assert [verdict.state for verdict in verdicts] == ["failed", "planned", "planned"]
    assert verdicts[1].why.startswith("the allocation 7 ended before the run started; `jobs submit` submits the run by sbatch")


def test_a_runner_in_an_allocation_of_another_cluster_is_another_runner(tmp_path, monkeypatch):
    """Two clusters may give the same number to two allocations."""
    study = Study(tmp_path, 1)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
    runner = subprocess.Popen(["sleep", "600"], env=os.environ | {"SLURM_CLUSTER_NAME": "cm4"})
    try:
        started_s = psutil.Process(runner.pid).create_time()
        record = Runner(schema=1, pid=runner.pid, created=started_s, boot_id=host.read_boot_id())
        folder = study.workspace.shardlab_folder / "allocation"
        folder.mkdir(parents=True)
        files.write_json(folder / "runner.json", record)
        with pytest.raises(ShardlabError, match="are being started in the allocation cm4:7, not in this one"):
            in_allocation.SCHEDULER.submit(study.workspace, [], SubmitOptions())
    finally:
        runner.kill()
        runner.wait()


@pytest.mark.parametrize(
    ("script", "ended"),
    [
        ("echo JobId=7 JobState=RUNNING", False),
        ("echo JobId=7 JobState=SUSPENDED", False),
        ("echo JobId=7 JobState=COMPLETING", True),
        ("echo JobId=7 JobState=TIMEOUT", True),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", True),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", False),
    ],
)
def test_an_allocation_has_ended_only_if_slurm_says_so(tmp_path, monkeypatch, script, ended):
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert allocation.has_ended("7") is ended
