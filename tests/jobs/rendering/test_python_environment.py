"""Runs in further environments of the cluster file: their interpreter, packages and container, and environments that are not
ready."""

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support_cells import CELL

from jobs.planning import plan
from jobs.rendering import preview, render
from jobs.ssh import step
from jobs.submission import submit
from shardlab import __version__
from shardlab.cluster import cluster
from shardlab.errors import InputError
from shardlab.workspace.workspace import Workspace

SITE = """\
schema: 1
name: site
provider: slurm
slurm: {partition: gpu}
gpus: {per_node: 4}
storage: {shared: /scratch/a}
environments:
  image: {container: /project/torch.sif, runtime: pyxis}
  other: {packages: [einops==0.8.1]}
"""
NODES = """\
schema: 1
name: site
provider: ssh
nodes: [{name: gpu0, host: 10.9.9.1, roles: [controller, worker]}]
storage: {shared: /scratch/a}
environments: {other: {packages: [einops==0.8.1]}}
"""


def context_of(workspace, text=SITE, python=sys.executable):
    """The values that all runs on the cluster of a file have in common, after `provision` has made its environments."""
    file = workspace.path / "cluster.yaml"
    file.write_text(text)
    site = cluster.load_cluster(file)
    entries = {
        name: {"python": python, "keys": keys.compute_digest(), "version": "3.11.2"} for name, keys in site.environments.items()
    }
    nodes = [{"name": "gpu0", "host": "10.9.9.1", "python": "/scratch/a/python-default/bin/python", "roles": ["worker"]}]
    workspace.shardlab_folder.mkdir(exist_ok=True)
    content = {"schema": 1, "cluster": "site", "nodes": nodes, "environments": entries}
    (workspace.shardlab_folder / "inventory.json").write_text(json.dumps(content))
    return render.make_render_context("m", site, workspace)


def run_in(context, environment):
    return render.make_run(msgspec.structs.replace(CELL, environment=environment), 1, 1, context)


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path)


def test_the_script_of_a_run_starts_the_python_of_its_environment(workspace, tmp_path):
    python = tmp_path / "python-0123456789ab/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    context = context_of(workspace, python=str(python))
    scripts = {}
    for name in (None, "other", "image"):
        scripts[name] = render.render_script(run_in(context, name), Path("/scratch/a/runs/r"), context.cluster, None)
    supervisor = f"exec {python} -m jobs.supervisor.attempt"
    assert [supervisor in scripts[name] for name in (None, "other", "image")] == [False, True, True]
    assert ["--container-image=/project/torch.sif" in scripts[name] for name in (None, "other", "image")] == [
        False,
        False,
        True,
    ]
    assert f"{python.parent}/rank-python" in scripts["image"]


def test_a_run_records_the_packages_of_its_environment_and_not_those_of_this_process(workspace, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
    (packages,) = (tmp_path / "other/lib").glob("python3*/site-packages")
    paths = [entry for entry in sys.path if entry and not entry.endswith(".zip")]
    (packages / "paths.pth").write_text("".join(f"{path}\n" for path in paths))
    context = context_of(workspace, python=str(tmp_path / "other/bin/python"))
    same = run_in(context, "other")
    assert (same.packages, same.versions) == (context.packages, context.versions)
    assert same.versions["shardlab"] == __version__
    (packages / "some_package-1.0.dist-info").mkdir()
    changed = run_in(context_of(workspace, python=str(tmp_path / "other/bin/python")), "other")
    assert changed.packages not in (None, same.packages)
    assert run_in(context, None).packages == same.packages
    assert run_in(context, None).python is None


@pytest.mark.parametrize("text", [SITE, NODES])
def test_an_environment_whose_interpreter_is_gone_is_refused(workspace, text):
    words = "the environment other: /gone/bin/python does not start: No such file or directory. Run: provision CLUSTER.yaml"
    with pytest.raises(InputError, match=re.escape(words)):
        run_in(context_of(workspace, text, "/gone/bin/python"), "other")


def test_scripts_for_reading_need_no_interpreter_of_an_environment(workspace):
    context = context_of(workspace, python="/gone/bin/python")
    script_preview = preview.make_preview(workspace, context.cluster, on_login_node=False)
    run = run_in(render.render_for_reading(context, script_preview), "other")
    assert run.python is None


def test_an_interpreter_that_does_not_start_is_named_with_its_reason(workspace, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'the module cuda/13 cannot be loaded' >&2\nexit 1\n")
    broken.chmod(0o755)
    words = f"the environment other: {broken} does not start: the module cuda/13 cannot be loaded. Run: provision CLUSTER.yaml"
    with pytest.raises(InputError, match=re.escape(words)):
        run_in(context_of(workspace, python=str(broken)), "other")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SITE + "  more: {}\n", "the environment more is not ready on the cluster site. Run first: provision CLUSTER.yaml."),
        (
            SITE.replace("0.8.1", "0.8.2"),
            "the environment other changed in the cluster file since `provision` made it. Run first",
        ),
    ],
)
def test_an_environment_that_is_not_made_as_the_file_says_is_refused(text, words, workspace):
    made = context_of(workspace)
    (workspace.path / "cluster.yaml").write_text(text)
    site = cluster.load_cluster(workspace.path / "cluster.yaml")
    name = words.split()[2]
    with pytest.raises(InputError, match=re.escape(words)):
        run_in(msgspec.structs.replace(made, cluster=site), name)
    matrix = workspace.path / "m.yaml"
    cell = f"workload: gpt2-tiny, strategy: ddp, gpus: 2, global_batch_size: 16, steps: 2, environment: {name}"
    matrix.write_text(f"schema: 1\nname: m\ndefaults: {{{cell}}}\n")
    planned = plan.plan_matrix(workspace, str(matrix), site, where=None, repeats=None)
    assert [remark for remark in planned.remarks if words in remark] != []
    with pytest.raises(InputError, match=re.escape(words)):
        submit.decide_runs(workspace, planned.cells, planned.repeats_by_cell, planned.context)
    assert not workspace.runs.exists()


def test_tasks_on_nodes_without_slurm_start_in_the_environment_of_the_run(workspace, monkeypatch):
    monkeypatch.setenv("SHARDLAB_NODES", "gpu0")
    context = context_of(workspace, NODES)
    folders = [render.write_run_folder(run_in(context, name), workspace.runs, context) for name in ("other", None)]
    pythons = [step.read_chosen_nodes(folder, folder.read_run())[0].python for folder in folders]
    assert pythons == [sys.executable, "/scratch/a/python-default/bin/python"]
