"""Generated text is compared whole: the help of every command, the scripts of runs, the summary of runs that were recorded.

To accept a change: SHARDLAB_GOLDEN=write pytest tests/test_golden.py

golden/recorded holds what `jobs submit --matrix ./recorded.yaml --wait` left in a workspace of its own, on a machine with two
processors that were busy with other things. Logs, scripts and the network cards of other work are taken out. A new schema of
records needs it made again.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support_cells import CELL
from support_collect import ten_digits

import jobs.cli
from collect import load, summary
from jobs import render
from shardlab import cell as cells
from shardlab.run import Run, World
from shardlab.workspace import Workspace

GOLDEN = Path(__file__).parent / "golden"
COMMANDS = [
    "shardlab",
    "shardlab shell-init",
    "shardlab schema",
    "provision",
    "jobs",
    *(f"jobs {verb}" for verb in sorted(jobs.cli.EXAMPLES)),
    "collect",
    *(f"collect {verb}" for verb in ("compare", "export", "fetch", "metrics", "sample", "summarize", "trace", "verdicts")),
]
HOSTILE = '/tmp/it\'s "here"\n; touch owned; $(touch owned) `touch owned` #'


def same_as_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("SHARDLAB_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def run_of(launcher: str) -> Run:
    cell = msgspec.structs.replace(CELL, launcher=launcher)
    return Run(
        schema=1,
        run_id="ddp-gpt2-tiny-0123456789ab-r1",
        matrix="m",
        cell=cell,
        cell_hash=cells.cell_hash(msgspec.to_builtins(cell)),
        repeat=1,
        attempt=1,
        launcher=launcher,
        rehearsal=launcher == "fork",
        world=World(1, 2, 2),
        cluster={"name": "local", "provider": "local"},
        data_path="/data",
        versions={"shardlab": "0.0.0"},
        git_commit=None,
        templates={},
        created="2026-01-01T00:00:00+00:00",
    )


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse lays help out differently in each Python; held on 3.11")
@pytest.mark.parametrize("command", COMMANDS)
def test_help(command):
    module, *verb = command.split()
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    code = f"import sys; from {module}.cli import main; sys.exit(main({[*verb, '--help']!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "example:" in done.stdout
    same_as_golden(f"help/{command.replace(' ', '-')}.txt", done.stdout)


@pytest.mark.parametrize("launcher", ["torchrun", "fork"])
def test_scripts(launcher, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python3")
    same_as_golden(f"scripts/{launcher}.sh", render.script(run_of(launcher), Path(HOSTILE)))


def test_a_script_runs_in_a_folder_with_a_hostile_name_and_does_nothing_else(tmp_path, monkeypatch):
    folder = tmp_path / 'it\'s "here"\n; touch owned; $(touch owned) `touch owned` #'
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    script = tmp_path / "job.sh"
    script.write_text(render.script(run_of("torchrun"), folder))
    done = subprocess.run(["bash", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.startswith("-m jobs.attempt . -- /bin/echo -m torch.distributed.run --nnodes=1 --nproc-per-node=2")
    assert not list(tmp_path.rglob("owned"))


def test_the_summary_of_a_recorded_workspace(tmp_path):
    shutil.copytree(GOLDEN / "recorded", tmp_path, dirs_exist_ok=True)
    found = summary.summarize(load.load(Workspace(tmp_path), None), "single")
    found.created_s = 0.0
    assert [row.states for row in found.rows] == [{"completed": 2}, {"completed": 2}, {"oom": 2}]
    text = msgspec.json.format(msgspec.json.encode(ten_digits(msgspec.to_builtins(found))), indent=1).decode() + "\n"
    assert str(tmp_path) not in text
    same_as_golden("recorded/summary.json", text)
