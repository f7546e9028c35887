"""`jobs` in an installation without torch: it refuses to submit runs to this machine, and submits runs to a cluster."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from support_e2e import MATRIX
from support_queue import CLUSTER, Queue
from support_trust import make_own

ROOT = Path(__file__).parents[2]
EXTRA = ("torch", "functorch", "numpy", "transformers", "tokenizers", "deepspeed", "polars", "plotly")
FAR = """\
schema: 1
name: far
provider: ssh
nodes: [{name: gpu0, host: 10.9.9.1, roles: [controller, worker]}]
storage: {shared: /mydata}
slurm: {}
"""


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """The Python interpreter of a virtual environment with the packages of this environment, except torch and other extras."""
    folder = tmp_path_factory.mktemp("light")
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.lower().startswith(EXTRA):
            (site / package.name).symlink_to(package)
    return folder / "bin" / "python"


@pytest.fixture
def jobs(light, tmp_path):
    (tmp_path / "small.yaml").write_text(MATRIX.format(steps=3, more="axes: {seed: [1, 2]}\ninclude: [{strategy: single}]"))

    def jobs(*words, python=light):
        matrix = ["--matrix", str(tmp_path / "small.yaml")] if words[0] in ("plan", "submit", "render") else []
        command = [python, "-P", "-m", "jobs", *words, *matrix, "--workspace", tmp_path / "w"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return jobs


NEEDS = "error: training on this machine needs the package 'torch', which is not installed here; install it with: "


def test_runs_for_this_machine_are_refused_before_anything_is_written(jobs, light, tmp_path):
    done = jobs("submit")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{NEEDS}{light} -m pip install -e '{ROOT}[trainers]'\n" in done.stderr
    assert not (tmp_path / "w").exists()


def test_the_analysis_of_traces_needs_no_torch_but_numpy(jobs, tmp_path):
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "rank0.json").write_text("{}")
    done = jobs("trace", str(tmp_path / "traces"))
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "error: the analysis of traces on this machine needs the package 'numpy', which is not installed here; " in done.stderr
    )
    assert not (tmp_path / "w" / "runs").exists()


def test_a_retry_on_this_machine_is_refused_without_torch(jobs, tmp_path):
    assert jobs("render").returncode == 0
    before = sorted((tmp_path / "w/runs").rglob("*"))
    done = jobs("retry", "--only", "failed")
    assert done.returncode == 1
    assert NEEDS in done.stderr
    assert sorted((tmp_path / "w/runs").rglob("*")) == before


def test_plans_and_dry_runs_work_without_torch(jobs):
    done = jobs("plan")
    assert done.returncode == 0
    assert "note: torch is not installed here; before `jobs submit` on this machine, install it with: " in done.stderr
    assert jobs("submit", "--dry-run").returncode == 0
    assert "torch is not" not in jobs("plan", python=sys.executable).stderr


def test_a_controller_needs_no_torch(jobs, tmp_path, monkeypatch):
    Queue(tmp_path / "slurm", monkeypatch)
    (tmp_path / "w").mkdir()
    (tmp_path / "w/cluster.yaml").write_text(CLUSTER)
    assert jobs("submit").returncode == 0


def test_a_cluster_has_its_own_torch(jobs, tmp_path):
    make_own(tmp_path / "w")
    (tmp_path / "w/cluster.yaml").write_text(FAR)
    done = jobs("submit")
    assert "torch" not in done.stderr
    assert "inventory.json: no such file, so the nodes of the cluster far are not known." in done.stderr
    assert "torch" not in jobs("plan").stderr


def test_rehearsals_run_on_the_cluster_which_has_torch(jobs, tmp_path, monkeypatch):
    """The stand-in for `ssh` runs its last word on this machine, with the Python that has torch."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    (tmp_path / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    make_own(tmp_path / "w")
    (tmp_path / "w/cluster.yaml").write_text(FAR.replace("/mydata", str(tmp_path / "shared")))
    before = jobs("plan", "--rehearse", "--json")
    assert "torch is not installed here, and the rehearsals cannot run on far:" in before.stderr
    assert {cell["predicted"]["memory_from"] for cell in json.loads(before.stdout)["cells"]} == {"formula"}
    node = {"name": "gpu0", "host": "10.9.9.1", "python": sys.executable, "roles": ["controller"]}
    (tmp_path / "w/.shardlab/inventory.json").write_text(json.dumps({"schema": 1, "cluster": "far", "nodes": [node]}))
    found = jobs("plan", "--rehearse", "--json")
    assert {cell["predicted"]["memory_from"] for cell in json.loads(found.stdout)["cells"]} == {"rehearsal"}, found.stderr
    assert len(list((tmp_path / "shared").glob("workspaces/*/.shardlab/rehearsals/*.json"))) == 1
    assert not (tmp_path / "w/.shardlab/away.json").exists()  # the runs of this workspace may still go to another cluster
    assert {cell["predicted"]["memory_from"] for cell in json.loads(jobs("plan", "--json").stdout)["cells"]} == {"formula"}
