"""The copy of shardlab's source that runs use: written once for equal sources, and removed when no run needs it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support_e2e import benches, until
from support_trust import make_own

from jobs.cli import main
from jobs.rendering import frozen_source
from shardlab.errors import ShardlabError
from shardlab.files import files, source_digest
from shardlab.runs.rundir import RunDir
from shardlab.workspace.workspace import Workspace

RENDER = ["render", "--matrix", "quickstart", "--where", "gpus == 1"]
# Shell code that makes the run's script wait for the file `go`, so that the test can change the source after the submission.
WAIT = 'until test -e "$PWD/../../go"; do sleep 0.05; done\nexec'


def rendered(path, *words):
    assert main([*RENDER, "--workspace", str(path), *words]) == 0
    return [json.loads(file.read_text()) for file in sorted(path.glob("runs/*/run.json"))]


def test_a_copy_has_the_digest_of_its_source_and_read_only_files(tmp_path):
    run, *_ = rendered(tmp_path)
    copy = Path(run["source"])
    assert copy == tmp_path / ".shardlab/source" / source_digest.digest_source()
    assert source_digest.digest_source(copy) == copy.name
    assert run["packages"] == source_digest.digest_installed_packages()
    assert {path.stat().st_mode & 0o777 for path in source_digest.list_source_files(source_digest.RUN_PACKAGES, copy)} == {
        0o444
    }
    before = copy.stat().st_ino
    rendered(tmp_path)
    assert copy.stat().st_ino == before
    assert files.list_names(copy.parent) == [copy.name]


def test_a_process_that_starts_as_the_script_says_uses_the_copy_and_compiles_nothing(tmp_path):
    copy = tmp_path / source_digest.digest_source()
    program = "import jobs.supervisor.attempt, sys; print(jobs.supervisor.attempt.__file__)"
    environment = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    frozen_source.freeze_source(copy)
    done = subprocess.run(
        [sys.executable, "-P", "-v", "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == f"{copy / 'jobs/supervisor/attempt.py'}\n"
    assert f"# code object from '{copy / 'shardlab/runs/rundir.py'}'" not in done.stderr


def test_a_damaged_copy_is_replaced_at_the_next_submission(tmp_path):
    copy = Path(rendered(tmp_path)[0]["source"])
    (copy / "jobs/supervisor/attempt.py").unlink()
    rendered(tmp_path)
    assert source_digest.digest_source(copy) == copy.name
    assert files.list_names(copy.parent) == [copy.name]


def test_a_source_that_changes_while_it_is_copied_leaves_nothing(tmp_path):
    with pytest.raises(ShardlabError, match="changed while this command read it; run the command again"):
        frozen_source.freeze_source(tmp_path / ("0" * 12))
    assert list(tmp_path.iterdir()) == []


def test_the_source_copy_of_runs_rendered_elsewhere_is_beside_them(tmp_path):
    """`jobs render --out FOLDER` writes the source copy into FOLDER and nothing into the workspace."""
    assert main([*RENDER, "--workspace", str(tmp_path / "w"), "--out", str(tmp_path / "out")]) == 0
    (copy,) = (tmp_path / "out/.source").iterdir()
    assert copy.name == source_digest.digest_source()
    assert f"export SHARDLAB_SOURCE={copy}" in next(tmp_path.glob("out/*/job.sh")).read_text()
    assert not (tmp_path / "w").exists()


def test_copies_stay_while_an_unfinished_run_names_them(tmp_path):
    workspace = Workspace(tmp_path)
    first, second, *_ = [RunDir(tmp_path / "runs" / run["run_id"]) for run in rendered(tmp_path)]
    current = Path(first.read_run().source)
    for name, folder in (("old", first), ("older", second)):
        (current.parent / name).mkdir()
        folder.run_json.write_text(folder.run_json.read_text().replace(current.name, name))
    second.write_event("controller", "submitted", scheduler="local")
    second.write_event("attempt", "exited", code=1, reason="failed")
    (current.parent / ".half.tmp").mkdir()
    frozen_source.remove_unused_copies(workspace, current)
    assert files.list_names(current.parent) == [current.name, "old"]


@pytest.fixture
def bench(tmp_path):
    yield from benches(tmp_path)


@pytest.mark.e2e
def test_a_run_that_waits_trains_with_the_source_that_it_was_submitted_with(bench, tmp_path, monkeypatch):
    installed = tmp_path / "installed"
    for package in (*source_digest.RUN_PACKAGES, "provision"):
        shutil.copytree(source_digest.ROOT / package, installed / package)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    template = (installed / "templates/launch/local.sh.j2").read_text().replace("exec", WAIT)
    make_own(bench.path)
    (bench.path / "templates/launch").mkdir(parents=True)
    (bench.path / "templates/launch/local.sh.j2").write_text(template)
    bench.run("jobs", "submit", "--matrix", bench.matrix("axes: {strategy: [ddp], gpus: [2]}"))
    (run,) = bench.folders()
    # The test changes the source while the run's script waits. The runner, which started the script, already imported its own
    # source.
    until((run.log / "script.log").exists, "its script starts")
    for package in ("jobs", "trainers", "collect"):
        (installed / package / "__init__.py").write_text("raise SystemExit('edited since')\n")
    (bench.path / "go").touch()
    until(lambda: run.judge().state not in ("pending", "running"), "it ends")
    assert run.judge().state == "completed", bench.logs()
    shutil.rmtree(installed)  # the fixture `bench` runs commands at its end, which need intact source
    monkeypatch.delenv("PYTHONPATH")
