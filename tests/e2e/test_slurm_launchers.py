"""The same cell gives the same losses with every launcher that Slurm can start, on one node and on two nodes."""

import pytest
from support_long import only_in_long_form
from support_slurm import Study

from jobs.launcher import launchers

pytestmark = pytest.mark.e2e


@only_in_long_form
def test_a_cell_has_the_same_losses_through_each_launcher_of_slurm(slurm):
    """The short form has test_launchers_e2e.py, which compares all launchers on this machine."""
    names = sorted(launcher.name for launcher in launchers().values() if launcher.several_nodes)
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
