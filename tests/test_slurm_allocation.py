"""`jobs submit --in-allocation`: what an allocation has, and what is refused."""

import msgspec
import pytest
from support_golden import run_of
from support_queue import Queue, Study

from jobs import render
from jobs.schedulers import slurm
from jobs.slurm import allocation
from jobs.slurm.allocation import Allocation
from shardlab.cluster import Cluster
from shardlab.slurm_keys import Slurm

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
def test_what_scontrol_says_of_an_allocation(text, expected):
    assert allocation.parse(text) == expected


def test_outside_of_a_job_and_beside_options_of_sbatch_it_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slurm, "POLL_S", 0.0)
    queue, study = Queue(tmp_path / "slurm", monkeypatch), Study(tmp_path, 1)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert study.jobs("submit", "--in-allocation") == 2
    assert "this process is in no job of Slurm (SLURM_JOB_ID is not set)" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert study.jobs("submit", "--in-allocation") == 2
    assert "Slurm does not say what the job 7 has" in capsys.readouterr().err
    monkeypatch.setattr(allocation, "here", lambda: Allocation(1, 0))
    assert study.jobs("submit", "--in-allocation", "--pack") == 2
    assert "--pack: not with --in-allocation" in capsys.readouterr().err
    assert (queue.calls("sbatch"), study.workspace.runs.exists()) == ([], False)


def test_its_script_is_a_step_and_has_no_option_of_sbatch(tmp_path):
    run = msgspec.structs.replace(run_of("torchrun"), scheduler="allocation")
    text = render.script(run, tmp_path, Cluster(schema=1, name="c", provider="slurm", slurm=Slurm()), None)
    assert "#SBATCH" not in text
    assert "\n  srun \\\n" in text
    assert "--overlap" in text
