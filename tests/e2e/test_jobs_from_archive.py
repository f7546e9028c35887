"""`jobs submit --from FILE` submits the matrix of an archive. Code in the archive is executed only with --trust."""

import json
import shutil
import zipfile

import pytest
from support_e2e import benches
from support_trust import make_own

from jobs.cli import main
from shardlab.plugins import command_copies
from shardlab.runs.rundir import RunDir
from shardlab.workspace import archive
from shardlab.workspace.workspace import Workspace
from tests.collect.archiving.test_archive import rewritten
from tests.jobs.plugins.test_own_workloads import MATRIX, MODEL

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def archived(tmp_path_factory):
    """Yields (an archive with a completed run of a workload that its workspace defines; this workspace)."""
    for theirs in benches(tmp_path_factory.mktemp("theirs")):
        (theirs.path / "workloads").mkdir(parents=True)
        (theirs.path / "workloads" / "points.py").write_text(MODEL)
        (theirs.path / "m.yaml").write_text(MATRIX)
        make_own(theirs.path)
        theirs.run("jobs", "submit", "--matrix", str(theirs.path / "m.yaml"), "--set", "steps=3", "--wait")
        file = tmp_path_factory.mktemp("archive") / "mine.shardlab.zip"
        theirs.run("collect", "archive", "--out", str(file))
        yield file, Workspace(theirs.path)


@pytest.fixture
def bench(tmp_path):
    yield from benches(tmp_path)


def jobs(workspace: Workspace, *words: str) -> int:
    return main([*words, "--workspace", str(workspace.path)])


def test_the_archived_matrix_gives_the_same_cells_here(archived, bench):
    file, theirs = archived
    planned = bench.json("jobs", "submit", "--from", str(file), "--trust", "--dry-run")
    assert [run["id"] for run in planned] == theirs.list_run_ids()
    other = bench.json("jobs", "submit", "--from", str(file), "--trust", "--dry-run", "--set", "steps=4")
    assert [run["id"] for run in other] != theirs.list_run_ids()
    bench.run("jobs", "submit", f"--from={file}", "--trust", "--wait")
    assert list(bench.states()) == theirs.list_run_ids()
    assert (bench.path / "workloads" / "points.py").read_text() == MODEL
    (pair,) = bench.json("collect", "compare", str(file), str(bench.path))["pairs"]
    theirs_and_ours = {one["metric"]: (one["a"], one["b"]) for one in pair["metrics"]}["final_loss"]
    assert theirs_and_ours[0] == theirs_and_ours[1]
    bench.run("jobs", "submit", "--from", str(file), "--trust")
    assert len(bench.states()) == 1


def test_without_trust_nothing_is_written(archived, tmp_path, capsys):
    file, _ = archived
    assert jobs(Workspace(tmp_path / "ours"), "submit", "--from", str(file)) == 2
    said = capsys.readouterr().err
    assert "contains code: workloads/points.py" in said
    assert "--trust" in said
    assert not (tmp_path / "ours").exists()


def test_a_file_of_the_same_name_is_never_replaced(archived, tmp_path, capsys):
    file, _ = archived
    mine = tmp_path / "workloads" / "points.py"
    mine.parent.mkdir()
    mine.write_text("mine = 1\n")
    assert jobs(Workspace(tmp_path), "submit", "--from", str(file), "--trust") == 2
    assert "differs from the file of this name" in capsys.readouterr().err
    assert mine.read_text() == "mine = 1\n"
    assert not (tmp_path / "archived").exists()


SCRIPT = "from shardlab.steps import report\nfor step in (1, 2):\n    report(step=step, loss=0.5, tokens=3)\n"


@pytest.fixture(scope="module")
def archived_command(tmp_path_factory):
    """An archive with a completed run of a script, whose folder is gone since."""
    for theirs in benches(tmp_path_factory.mktemp("their script")):
        folder = theirs.path / "own"
        (folder / "tools").mkdir(parents=True)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "tools" / "prepare").write_text("#!/bin/sh\n")
        (folder / "tools" / "prepare").chmod(0o755)
        (folder / "link").symlink_to("tools/prepare")
        command = {"command": ["python", "train.py"], "folder": "own"}
        matrix = {"schema": 1, "name": "own", "defaults": {"launcher": "none", "workload": command}}
        (theirs.path / "own.yaml").write_text(json.dumps(matrix))  # JSON is YAML
        theirs.run("jobs", "submit", "--matrix", str(theirs.path / "own.yaml"), "--wait")
        file = tmp_path_factory.mktemp("archive") / "own.shardlab.zip"
        shutil.rmtree(folder)
        theirs.run("collect", "archive", "--out", str(file))
        theirs.run("collect", "archive", "--anonymous", "--out", str(file.with_name("anonymous.shardlab.zip")))
        yield file, Workspace(theirs.path)


def test_a_script_of_an_archive_runs_here_with_the_same_files(archived_command, bench):
    file, theirs = archived_command
    refused = bench.run("jobs", "submit", "--from", str(file), code=2).stderr
    assert "its matrix runs programs: own: python train.py. Read it and its files (collect open own.shardlab.zip)" in refused
    assert not list(bench.path.glob("archived"))
    planned = bench.json("jobs", "submit", "--from", str(file), "--trust", "--dry-run")
    assert [run["id"] for run in planned] == theirs.list_run_ids()
    bench.run("jobs", "submit", "--from", str(file), "--trust", "--wait")
    (run,) = [RunDir(path) for path in (bench.path / "runs").iterdir()]
    assert (run.work / "train.py").read_text() == SCRIPT
    assert (run.work / "tools" / "prepare").stat().st_mode & 0o777 == 0o755
    assert (run.work / "link").readlink().as_posix() == "tools/prepare"
    assert list(bench.states().values()) == ["completed"]


def test_files_of_a_script_that_were_changed_are_refused(archived_command, bench, tmp_path):
    file, _ = archived_command
    (packed,) = [name for name in zipfile.ZipFile(file).namelist() if name.startswith("workspace/commands/")]
    content = command_copies.pack_files(tmp_path, [])
    changed = rewritten(file, tmp_path, {packed: content})
    assert "did not arrive whole" in bench.run("jobs", "submit", "--from", str(changed), "--trust", code=2).stderr
    named = rewritten(file, tmp_path, {"workspace/commands/other.tar.gz": content})
    assert "other.tar.gz: is not the name" in bench.run("jobs", "submit", "--from", str(named), "--trust", code=2).stderr


def test_programs_of_an_archived_matrix_need_trust(archived_command, bench, tmp_path):
    file, _ = archived_command
    command = {"command": ["bash", "-c", f"touch {tmp_path}/ran"], "folder": "."}
    matrix = {"schema": 1, "name": "own", "defaults": {"launcher": "none", "workload": command}}
    hostile = rewritten(file, tmp_path, {"workspace/matrix/own.yaml": json.dumps(matrix).encode()})
    with zipfile.ZipFile(hostile) as old, zipfile.ZipFile(tmp_path / "bare.shardlab.zip", "w") as new:
        index = json.loads(old.read("archive.json"))
        kept = [name for name in index["files"] if "commands/" not in name and "folders.json" not in name]
        index["files"] = {name: index["files"][name] for name in kept}
        for name in kept:
            new.writestr(name, old.read(name))
        new.writestr("archive.json", json.dumps(index))
    refused = bench.run("jobs", "submit", "--from", str(tmp_path / "bare.shardlab.zip"), code=2).stderr
    assert "its matrix runs programs: " in refused
    assert f"bash -c touch {tmp_path}/ran" in refused
    assert not list(bench.path.glob("archived"))
    assert not (tmp_path / "ran").exists()


def test_an_anonymous_archive_lacks_the_files_of_a_script_and_says_so(archived_command):
    file = archived_command[0].with_name("anonymous.shardlab.zip")
    (reason,) = [left.why for left in archive.read_index(file).left_out if left.name == "own"]
    assert reason == "the files of the command own may contain names"
    assert not [name for name in zipfile.ZipFile(file).namelist() if "commands/" in name or "folders.json" in name]


def test_submit_needs_either_matrix_or_from(archived, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        jobs(Workspace(tmp_path), "submit", "--from", str(archived[0]), "--matrix", "quickstart")
    assert ended.value.code == 2
    with pytest.raises(SystemExit):
        jobs(Workspace(tmp_path), "submit")
    assert "one of the arguments --matrix --from is required" in capsys.readouterr().err
    (tmp_path / "no.zip").write_text("no archive")
    assert jobs(Workspace(tmp_path), "submit", "--from", str(tmp_path / "no.zip")) == 2
