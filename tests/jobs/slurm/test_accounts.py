"""Runs `jobs submit` and then `jobs status`, while stand-ins for squeue and sacct print what a real Slurm could print about the
job of the submitted run.

The printed lines have the same form as the lines in recorded/slurm, which Slurm 22.05 printed on practice nodes.
"""

import json

import pytest
from support_queue import CLUSTER, Queue

from jobs import cli
from jobs.schedulers import slurm
from jobs.slurm import query
from shardlab.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("source_copied_faster")
MATRIX = """\
schema: 1
name: m
defaults: {workload: gpt2-tiny, strategy: single, gpus: 1, global_batch_size: 4, seq_len: 16, steps: 1, prove: "off"}
"""
AT_WORK, ENDED = "1795283038|1795283081|work1|None", "1795283038|1795283081|work1|None"
DISABLED = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


class Sent:
    """A workspace with one submitted run, and stand-ins for Slurm's commands that answer questions about the job of the run."""

    def __init__(self, tmp_path, monkeypatch, capsys):
        self.queue, self.workspace, self.capsys = Queue(tmp_path / "slurm", monkeypatch), Workspace(tmp_path / "w"), capsys
        self.workspace.path.mkdir()
        (self.workspace.path / "cluster.yaml").write_text(CLUSTER)
        matrix = self.workspace.path / "m.yaml"
        matrix.write_text(MATRIX)
        assert cli.main(["submit", "--matrix", str(matrix), "--workspace", str(self.workspace.path)]) == 0
        ((_, *words),) = [["sbatch", *words] for words in self.queue.calls("sbatch")]
        self.name = next(word.removeprefix("--job-name=") for word in words if word.startswith("--job-name="))
        (self.folder,) = self.workspace.list_run_dirs()

    def answer(self, **scripts):
        """Replaces the stand-ins for these commands by shell scripts. NAME in a script stands for the name of the job."""
        for command, script in scripts.items():
            (self.queue.folder / command).write_text(f"#!/bin/sh\n{script.replace('NAME', self.name)}\n")

    def wrote(self, *events):
        for event, data in events:
            self.folder.write_event("attempt", event, **data)

    def status(self):
        """Returns what `jobs status --json` says about the run: (its state, the reason, its state in Slurm)."""
        self.capsys.readouterr()
        assert cli.main(["status", "--json", "--workspace", str(self.workspace.path)]) == 0
        (run,) = json.loads(self.capsys.readouterr().out)["runs"]
        return run["state"], run["why"], run["scheduler"]["raw"]


@pytest.fixture
def sent(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slurm, "ACCOUNTING_LAG_S", 0.0)  # a run is unknown at once if Slurm does not list its job
    return Sent(tmp_path, monkeypatch, capsys)


def test_a_job_that_sacct_does_not_list_yet_is_looked_up_with_squeue(sent):
    sent.answer(squeue=f"echo '7|NAME|RUNNING|{AT_WORK}'", sacct=f"echo '5|NAME|COMPLETED|{ENDED}'")
    found = query.find_jobs(["5", "7"], 0.0)
    assert {number: job.state for number, job in found.jobs.items()} == {"5": "COMPLETED", "7": "RUNNING"}
    assert found.complete


STARTED, WELL = ("started", {}), ("exited", {"code": 0, "reason": None})


@pytest.mark.parametrize(
    ("wrote", "squeue", "sacct", "state", "words"),
    [
        ((), f"echo '1|NAME|RUNNING|{AT_WORK}'", DISABLED, "pending", "its job is starting"),
        ((STARTED,), f"echo '1|NAME|RUNNING|{AT_WORK}'", DISABLED, "running", ""),
        ((STARTED,), f"echo '1|NAME|COMPLETING|{AT_WORK}'", DISABLED, "running", ""),
        ((STARTED,), "", f"echo '1|NAME|COMPLETED|{ENDED}'", "unknown", "did not record its end"),
        ((STARTED, WELL), "", f"echo '1|NAME|COMPLETED|{ENDED}'", "failed", "no result"),
        ((STARTED,), "", f"echo '1|NAME|OUT_OF_MEMORY|{ENDED}'", "oom", "host memory"),
        ((STARTED,), "", f"echo '1|NAME|NODE_FAIL|{ENDED}'", "node_fail", "a node of the job failed"),
        ((), "", f"echo '1|NAME|CANCELLED by 1000|{ENDED}'", "cancelled", "cancelled in Slurm"),
        # If Slurm loses its state, it numbers jobs from 1 again. Then job 1 belongs to somebody else and has another name.
        ((STARTED,), "", f"echo '1|rec.ok|COMPLETED|{ENDED}'", "unknown", "Slurm does not know its job 1"),
        ((STARTED,), f"echo '1|rec.ok|RUNNING|{AT_WORK}'", DISABLED, "unknown", "Slurm does not know its job 1"),
    ],
)
def test_a_status_follows_from_the_records_and_from_what_slurm_prints(sent, wrote, squeue, sacct, state, words):
    sent.wrote(*wrote)
    sent.answer(squeue=squeue, sacct=sacct)
    found = sent.status()
    assert (found[0], words in found[1]) == (state, True), found
