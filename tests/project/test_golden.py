"""Compares generated texts with golden files: the scripts of runs and the summary of recorded runs.

To accept a change, run `make golden`.

The runs in golden/recorded were made by `jobs submit --matrix ./recorded.yaml --wait` in a workspace of their own, on a machine
with two processors that also did other work. Then the logs, the scripts, and the network cards that other work used were
removed from the records. If the schema of records changes, make golden/recorded again.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support_collect import ten_digits
from support_golden import GOLDEN, HOSTILE, run_of, same_as_golden

from collect import summary
from collect.reading import load
from jobs.launcher import load_launchers
from jobs.rendering import render
from shardlab.cluster.cluster import THIS_MACHINE
from shardlab.workspace.workspace import Workspace


@pytest.mark.parametrize("launcher", sorted(load_launchers()))
def test_the_script_of_each_launcher_is_the_golden_text(launcher, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python3")
    same_as_golden(f"scripts/{launcher}.sh", render.render_script(run_of(launcher), Path(HOSTILE), THIS_MACHINE, None))


def test_a_script_runs_in_a_folder_with_a_hostile_name_and_does_nothing_else(tmp_path, monkeypatch):
    folder = tmp_path / HOSTILE.lstrip("/")
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    script = tmp_path / "job.sh"
    script.write_text(render.render_script(run_of("torchrun"), folder, THIS_MACHINE, None))
    done = subprocess.run(["bash", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.startswith(
        "-m jobs.supervisor.attempt . -- /bin/echo -m torch.distributed.run --nnodes=1 --nproc-per-node=2"
    )
    assert not list(tmp_path.rglob("owned"))


def test_the_summary_of_a_recorded_workspace_is_the_golden_document(tmp_path):
    shutil.copytree(GOLDEN / "recorded", tmp_path, dirs_exist_ok=True)
    found = summary.summarize(load.load_matrix(Workspace(tmp_path), None), "single")
    found.created_s = 0.0
    assert [row.states for row in found.rows] == [{"completed": 2}, {"completed": 2}, {"oom": 2}]
    text = msgspec.json.format(msgspec.json.encode(ten_digits(msgspec.to_builtins(found))), indent=1).decode() + "\n"
    assert str(tmp_path) not in text
    same_as_golden("recorded/summary.json", text)
