"""Workloads that a workspace defines in its own files: what identifies a workload, what is refused, and which code is
executed."""

import json
import os
import shutil
import time

import pytest
from support_trust import make_own

from jobs.cli import main

pytest_plugins = ["support_own_answers"]
pytestmark = pytest.mark.usefixtures("shared_answers")
MODEL = """\
"A linear model of random points."
import torch
from torch import nn
ITEMS = 64
points = torch.randn(ITEMS, 4, generator=torch.Generator().manual_seed(0))
def model(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))
def batch(items):
    return points[items], items % 3
"""
MATRIX = """\
schema: 1
name: mine
title: mine
defaults: {workload: points, strategy: single, launcher: fork, global_batch_size: 4, steps: 2}
axes: {seed: [1]}
"""


def workspace(folder, text=MODEL, name="points"):
    """An own workspace whose workload file contains `text`. The matrix of the workspace trains the workload."""
    (folder / "workloads").mkdir(parents=True)
    (folder / "workloads" / f"{name}.py").write_text(text)
    (folder / "m.yaml").write_text(MATRIX)
    return make_own(folder)


def render(made):
    """Runs `jobs render` in this workspace and returns the folder of the only run that it wrote."""
    assert main(["render", "--matrix", str(made.path / "m.yaml"), "--workspace", str(made.path)]) == 0
    (run_dir,) = made.list_run_dirs()
    return run_dir


def test_two_models_of_one_name_are_two_cells_and_the_run_carries_its_code(tmp_path):
    one, other = (workspace(tmp_path / name) for name in "ab")
    first = render(one).read_run()
    assert render(other).read_run().cell.hash() == first.cell.hash()
    shutil.rmtree(other.runs)
    (other.path / "workloads" / "points.py").write_text(MODEL.replace("nn.Linear(4, width)", "nn.Linear(4, width, bias=False)"))
    second = render(other)
    assert second.read_run().cell.hash() != first.cell.hash()
    assert (second.path / "workloads" / "points.py").read_bytes() == (other.path / "workloads" / "points.py").read_bytes()
    assert (first.own_workload.parameters, second.read_run().own_workload.parameters) == (67, 59)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("import torch\n1 / 0\n", "points", "points.py:2: ZeroDivisionError: division by zero."),
        ("def model(:\n", "points", "points.py:1: invalid syntax."),
        ("ITEMS = 1\n", "points", "points.py: defines no function `model`."),
        (MODEL.replace("points[items]", "torch.randn(len(items), 4)"), "points", "returned other tensors for the same items"),
    ],
)
def test_a_faulty_file_is_named_and_the_others_work(tmp_path, capsys, text, name, said):
    made = workspace(tmp_path, text, name)
    (made.path / "workloads" / "good.py").write_text(MODEL)
    assert main(["workloads", "--workspace", str(made.path), "--json"]) == 1
    shown = capsys.readouterr()
    assert said in shown.err
    listed = {entry["name"]: entry["file"] for entry in json.loads(shown.out)}
    assert listed["good"] == str(made.path / "workloads" / "good.py")
    assert listed["gpt2"] is None


def test_old_temporary_folders_of_earlier_commands_are_removed(tmp_path):
    made = workspace(tmp_path)
    store = made.shardlab_folder / "own"
    for left, age in (("old", 2), ("new", 0)):
        (store / f".{left}.7.tmp").mkdir(parents=True)
        os.utime(store / f".{left}.7.tmp", (time.time() - age * 24 * 3600,) * 2)
    (store / "points-0123456789abcdef.json").write_text("{}")
    render(made)
    assert [path.name for path in store.glob(".*")] == [".new.7.tmp"]
    assert len(list(store.glob("points-*.json"))) == 1


@pytest.mark.parametrize(("named", "code"), [("points", 0), ("pionts", 2)])
def test_the_claims_of_a_study_may_name_an_own_workload(tmp_path, capsys, named, code):
    made = workspace(tmp_path)
    claim = f"  - {{id: c1, says: It learns., where: ours, test: \"final_loss(workload='{named}') < 4\"}}\n"
    (tmp_path / "m.yaml").write_text(f"{MATRIX}claims:\n{claim}")
    assert main(["plan", "--matrix", str(tmp_path / "m.yaml"), "--workspace", str(made.path)]) == code
    said = capsys.readouterr()
    assert "points" in (said.err if code else said.out)
