"""The same cell gives the same losses with every launcher that Slurm can start, on one node and on two nodes."""

import json

import pytest
from support_long import LONG, only_in_long_form
from support_slurm import Study

from jobs.launcher import load_launchers

pytestmark = pytest.mark.e2e
# A training script of a user: its loss is the sum of all ranks and their numbers, so it shows that the ranks have met.
SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(4):
    ones = torch.tensor([10.0 + dist.get_rank()])
    dist.all_reduce(ones)
    if dist.get_rank() == 0:
        print("step", step, "loss", ones.item())
dist.destroy_process_group()
"""
COMMAND = {
    "command": ["python", "train.py"],
    "folder": "own",
    "steps": {"regex": r"step (?P<step>\d+) loss (?P<loss>\S+)"},
}


@only_in_long_form
def test_a_cell_has_the_same_losses_through_each_launcher_of_slurm(slurm):
    """The short form has test_launchers_e2e.py, which compares all launchers on this machine."""
    names = sorted(
        launcher.name for launcher in load_launchers().values() if launcher.several_nodes and launcher.starts_trainings
    )
    assert names == ["deepspeed", "submitit", "torchrun"]
    study = Study.new(slurm, "launchers")
    try:
        more = f"axes: {{strategy: [ddp], gpus: [2], nnodes: [1, 2], launcher: {names}}}"
        name = study.matrix(more, steps=5, name="launchers")
        # Runs with the launcher submitit request more from Slurm than other runs, so they are submitted as an array of their
        # own.
        study.jobs("submit", "--matrix", name, "--where", "launcher == 'submitit' and nnodes == 1", "--repeats", "2")
        study.jobs("submit", "--matrix", name, "--wait")
        runs = study.runs()
        assert [run["state"] for run in runs] == ["completed"] * 7
        assert ("array", 2) in [(one.kind, sum("-submitit-" in run for run in one.runs)) for one in study.submissions()]
        assert {len(run["hosts"]) for run in runs if run["cell"]["nnodes"] == 2} == {2}
        losses = [[[one.loss for one in folder.steps(rank).records] for rank in (0, 1)] for folder in study.folders()]
        assert [len(steps) for steps in losses[0]] == [5, 5]
        assert all(one == losses[0] for one in losses)
    finally:
        study.end()


def test_the_ranks_of_a_command_meet_through_each_launcher_of_slurm(slurm):
    names = ["deepspeed", "srun", "submitit", "torchrun"] if LONG else ["srun", "submitit"]
    study = Study.new(slurm, "command-launchers")
    try:
        study.write("own/train.py", SCRIPT)
        axes = {"launcher": names, "nnodes": [1, 2] if LONG else [2]}
        matrix = {"schema": 1, "name": "own", "defaults": {"workload": COMMAND, "gpus": 2}, "axes": axes}
        name = study.write("own.yaml", json.dumps(matrix))  # JSON is YAML
        study.jobs("submit", "--matrix", name, "--wait")
        ends = {folder.run_id: (folder.judge().state, folder.read_result().final_loss) for folder in study.folders()}
        assert list(ends.values()) == [("completed", 21.0)] * (len(names) * (1 + LONG)), ends
    finally:
        study.end()
