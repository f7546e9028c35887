"""A search for a batch size as a job of Slurm: one job runs all tries, and a restarted job continues the search."""

import os
import subprocess

import pytest
from support_queue import CLUSTER, Queue
from support_search import SearchedWorkspace

pytestmark = pytest.mark.usefixtures("source_copied_faster")
STATES = {"1": "completed", "2": "completed", "4": "oom", "3": "oom"}


@pytest.fixture
def searched(tmp_path, monkeypatch):
    folder = tmp_path / "w"
    folder.mkdir()
    searched = SearchedWorkspace(folder, "slurm.sbatch")
    (folder / "cluster.yaml").write_text(CLUSTER)
    searched.queue = Queue(tmp_path / "slurm", monkeypatch)
    return searched


def test_one_job_runs_all_tries(searched):
    assert "the largest that fits is 2" in searched.jobs("submit", "--wait")
    assert searched.states() == STATES
    (call,) = searched.queue.calls("sbatch")
    (sent,) = {
        event.data["token"] for folder in searched.folders() for event in folder.read_events() if event.event == "submitted"
    }
    assert f"--job-name={sent}" in call
    assert "its search has ended" in searched.jobs("submit")
    assert len(searched.queue.calls("sbatch")) == 1


def test_a_restarted_search_job_continues_with_the_interrupted_try(searched):
    searched.queue.rule(ends=0)
    searched.jobs("submit")
    script = searched.folders()[0].path / "job.sbatch"
    job = os.environ | {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "m"}
    searched.flag("dies-2")
    assert subprocess.run(["bash", script], env=job, check=False).returncode < 0
    assert searched.sizes() == [1, 2]
    assert subprocess.run(["bash", script], env=job | {"SLURM_RESTART_COUNT": "1"}, check=False).returncode == 0
    assert [folder.judge().state for folder in searched.folders()] == list(STATES.values())
    assert subprocess.run(["bash", script], env=job | {"SLURM_RESTART_COUNT": "2"}, check=False).returncode == 0
    assert [[event.event for event in folder.read_events()].count("started") for folder in searched.folders()] == [1] * len(
        STATES
    )
