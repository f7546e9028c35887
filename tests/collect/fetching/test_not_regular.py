"""In a run folder only regular files and folders are read. Symlinks, FIFOs and sockets are named in a message and skipped.

A symlink may lead outside of the run folder, and reading a FIFO would block forever.
"""

import errno
import os
import socket

import pytest
import support_collect as support

from collect.cli import main
from collect.fetching import fetched_run
from collect.loading.loaded_run import LoadedRun
from collect.sources import memory
from collect.traces import command, run_traces
from shardlab.errors import InputError
from shardlab.transfer import manifest
from shardlab.workspace.workspace import Workspace

PLACES = ("events.other.jsonl", "result.json", "run.json", "samples/node0.jsonl", "steps/rank-00000.jsonl", "validation.jsonl")


@pytest.fixture
def workspace(tmp_path):
    made = Workspace(tmp_path / "w")
    support.completed(made, support.cell())
    return made


@pytest.fixture
def run(workspace):
    return workspace.list_run_dirs()[0]


def put(kind, path, outside):
    """Replace the file `path` by a symlink, a FIFO or a socket.

    kind: which of the three. outside: the path to which the old file is moved, and to which the symlink leads.
    """
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("{}\n")
    if kind == "a symlink":
        path.symlink_to(outside)
    elif kind == "a FIFO":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))


@pytest.mark.parametrize("kind", ["a symlink", "a FIFO", "a socket"])
@pytest.mark.parametrize("place", PLACES)
def test_a_link_or_fifo_in_place_of_a_record_file_is_named_and_not_read(run, tmp_path, monkeypatch, kind, place):
    monkeypatch.chdir(tmp_path)  # makes the path of the socket short: at most 108 bytes are allowed
    put(kind, run.path / place, tmp_path / "outside")
    found = LoadedRun.read(run)
    if place in ("run.json", "result.json"):
        assert found.verdict.state == "unknown"
        assert f"it is {kind}, and only regular files are read" in found.verdict.why
    else:
        assert found.damage.describe() == f"{place}: {kind}, which was not read"
    assert not (found.step_records.get(0) and place.startswith("steps"))
    assert not (found.sample_records.get("node0") and place.startswith("samples"))


@pytest.mark.parametrize("name", ["env", "samples", "steps"])
def test_a_folder_that_is_a_link_is_named_and_not_entered(run, tmp_path, name):
    (run.path / name).rename(tmp_path / "outside")
    (run.path / name).symlink_to(tmp_path / "outside")
    found = LoadedRun.read(run)
    assert found.damage.describe() == f"{name}: a symlink, which was not read"
    assert not {"env": found.hosts, "samples": found.sample_records, "steps": found.step_records}[name]


@pytest.mark.parametrize("name", ["", "env", "steps"])
def test_a_folder_that_cannot_be_opened_sets_its_run_aside_alone(workspace, run, monkeypatch, capsys, name):
    support.completed(workspace, support.cell(), repeat=2)
    refused = str(run.path / name) if name else str(run.path)

    def refusing(function):
        def called(path=".", *words, **options):
            if str(path) == refused:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return function(path, *words, **options)

        return called

    for function in ("open", "listdir"):  # chmod would not refuse root, who may run the tests
        monkeypatch.setattr(os, function, refusing(getattr(os, function)))
    assert main(["fetch", "--workspace", str(workspace.path)]) == 1
    said = capsys.readouterr()
    assert f"{run.run_id}: set aside: cannot read {refused}: permission denied" in said.err
    assert "completed" in said.out


@pytest.mark.parametrize("where", ["the file", "the folder"])
def test_traces_and_memory_curves_behind_a_link_are_not_read(workspace, run, tmp_path, where):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "rank-00000.json").write_text('{"rank": 0, "step": 1, "t_ms": [], "points": {}}')
    (outside / "rank-00000.json.gz").write_text("[]")
    for folder in (run.path / "memory", run.path / "trace"):
        if where == "the folder":
            folder.symlink_to(outside)
        else:
            folder.mkdir()
            for file in outside.iterdir():
                (folder / file.name).symlink_to(file)
    assert memory.read_memory_curves(run.memory_file(0)) is None
    assert run_traces.read_run_traces(run.path, "exact").exact == []
    with pytest.raises(InputError, match="no traces"):
        command.find_trace_files(workspace, run.run_id)
    assert sorted(path.name for path in outside.iterdir()) == ["rank-00000.json", "rank-00000.json.gz"]


def test_a_run_that_waits_for_another_start_is_not_complete(workspace):
    """A run that Slurm requeued after its time limit is not complete, because its files change when Slurm starts it again."""
    again = support.prepare(workspace, support.cell(), repeat=3)
    support.event(again, "started", 0)
    support.event(again, "exited", 5, code=1, reason="timeout")
    assert fetched_run.fetch_run(again).complete
    (again.path / manifest.MANIFEST_FILE).unlink()
    support.event(again, "requeued", 6)
    found = fetched_run.fetch_run(again)
    assert (found.state, found.complete, found.problems) == ("timeout", False, [])
    support.event(again, "started", 7)
    again.steps_file(0).parent.mkdir(exist_ok=True)
    again.steps_file(0).write_text("")
    assert fetched_run.fetch_run(again).problems == []


def test_a_file_name_that_is_no_utf_8_is_reported_and_not_in_the_manifest(workspace, run, capsys):
    """A manifest cannot contain a file name that is not valid UTF-8.

    If the manifest contained a changed name instead, each later fetch would report that this file is missing.
    """
    (run.path / os.fsdecode(b"x\xff")).write_text("x")
    for _ in range(2):
        assert main(["fetch", "--workspace", str(workspace.path)]) == 1
        said = capsys.readouterr().err
        assert "x? is a file whose name is not valid UTF-8; only regular files and folders with names in UTF-8 are " in said
        assert "is missing" not in said
    assert "x?" not in (run.path / manifest.MANIFEST_FILE).read_text()
