"""`collect fetch` copies runs from a cluster to this machine: each copy is identical, whatever files already exist."""

import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
import support_collect as support
from support_fetch import COMMAND, Cluster, contents, tree

from collect.cli import main
from collect.fetching import progress
from shardlab import placement, remote_workspace
from shardlab.rundir import RunDir

SUBJECT = "result.json"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A cluster with one completed run, and a folder beside the workspace that no command may touch."""
    made = Cluster(tmp_path, tmp_path / "desk/ws")
    support.completed(made.there, support.cell())
    (tmp_path / "desk/victim").mkdir()
    (tmp_path / "desk/victim/manifest.json").write_text("mine")
    (tmp_path / "desk/victim/file").write_text("mine")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    # Progress messages are switched off, because their number depends on how busy this machine is.
    monkeypatch.setattr(progress, "QUIET_S", 3600.0)
    return made


@pytest.fixture
def victim(cluster, tmp_path):
    folder = tmp_path / "desk/victim"
    before = tree(folder)
    yield folder
    assert tree(folder) == before


@pytest.fixture
def there(cluster):
    return cluster.there.all_runs()[0].path


@pytest.fixture
def here(cluster, there):
    return cluster.here.runs / there.name


@pytest.fixture
def fetch(cluster, capsys):
    """A function that runs `collect fetch`. It returns (its messages, its JSON document, or None if it printed no document)."""

    def run(code=0):
        cluster.no_fault()
        assert main(["fetch", "--json", "--workspace", str(cluster.here.path)]) == code
        said = capsys.readouterr()
        return said.err, json.loads(said.out) if said.out else None

    return run


def connections(cluster):
    return len((cluster.folder / "connections").read_text().splitlines())


def before(cluster, connection, script):
    """Make the cluster run a shell script before a connection.

    connection: the number of the connection; 0 means every connection.
    """
    path = cluster.folder / "before"
    path.write_text(f'#!/bin/sh\nif test "$1" = {connection} || test {connection} = 0; then {script}; fi\n')
    path.chmod(0o755)


def test_a_run_that_is_here_is_not_transferred_again(cluster, fetch, there, here):
    (found,) = fetch()[1]
    assert (found["complete"], found["hashed"]) == (True, found["files"])
    assert connections(cluster) == 3
    assert contents(here) == contents(there)
    (found,) = fetch()[1]
    assert (found["complete"], found["hashed"]) == (True, 0)
    assert connections(cluster) == 2


def test_a_list_of_names_of_more_than_a_page_arrives(fetch, there, here):
    """rsync reads a list of file names in parts of 4096 bytes. In this test the last name crosses the end of the first part."""
    (there / "log").mkdir()
    for rank in range(65):
        (there / f"log/rank-{rank:05d}.log").write_text("x")
    names = [f"{there.name}/{name}\0" for name in sorted(contents(there))]
    missing = 4096 - len("".join(names)) + 10
    assert 0 < missing < 200
    (there / "log/rank-00000.log").rename(there / f"log/rank-00000{'x' * missing}.log")
    fetch()
    assert contents(here) == contents(there)


@pytest.mark.parametrize("left", ["log/old.log", ".old", "log/.rsync-partial/old"])
def test_what_an_earlier_transfer_left_beside_a_new_run_does_not_get_into_it(cluster, fetch, there, here, left):
    """Files are copied to a folder in `.incoming`. It becomes the run folder if it has exactly the manifest's files."""
    path = cluster.here.runs / ".incoming/files" / there.name / left
    path.parent.mkdir(parents=True)
    path.write_text("old")
    fetch()
    assert contents(here) == contents(there)
    assert not (cluster.here.runs / ".incoming").exists()


def test_storage_that_both_share_needs_no_connection_for_files(cluster, fetch, there, here):
    (cluster.there.path / remote_workspace.MARK).write_text("far:/ws\n")
    fetch()
    assert connections(cluster) == 1
    assert contents(here) == contents(there)


def test_a_part_that_the_first_node_cannot_gather_is_told_here_too(fetch, there, here):
    """The first node lacks the run's files of gpu1. `collect fetch` on this machine reports this too."""
    RunDir(there).write_event("step", placement.PLACED, nodes=["gpu1"])
    said, (found,) = fetch(code=1)
    assert not found["complete"]
    assert found["parts"][0].startswith("the part of gpu1 is missing: ")
    assert f"{there.name}: the part of gpu1 is missing: " in said
    assert contents(here) == contents(there)


def test_a_run_that_goes_on_is_fetched_again(cluster, fetch, there, here):
    going = support.prepare(cluster.there, support.cell(), repeat=2)
    support.event(going, "started", 0)
    for steps in (2, 5):
        going.steps_file(0).unlink(missing_ok=True)
        support.train(going, steps=steps)
        assert [run["complete"] for run in fetch()[1]] == [True, False]
        assert contents(cluster.here.runs / going.run_id) == contents(going.path)


def test_a_run_that_was_started_again_and_ended_again_is_fetched_again(fetch, there, here):
    fetch()
    (there / "manifest.json").unlink()
    (there / SUBJECT).write_bytes((there / SUBJECT).read_bytes() + b"\n")
    fetch()
    assert contents(here) == contents(there)


@pytest.mark.parametrize("left", ["nothing of a file", "an older state of a file"])
def test_a_run_that_an_older_release_left_cut_is_fetched_again(cluster, fetch, there, here, left):
    """An older version of shardlab transferred a run's manifest before the run's files.

    If its transfer was cut, a run folder can have a manifest and not the files that the manifest lists.
    """
    fetch()
    steps = here / "steps/rank-00000.jsonl"
    if left == "nothing of a file":
        shutil.rmtree(steps.parent)
    else:
        old = steps.stat().st_mtime - 60
        steps.write_bytes(steps.read_bytes()[:500])
        os.utime(steps, (old, old))
    assert "problems" not in fetch()[1][0]
    assert contents(here) == contents(there)


def test_a_result_that_was_changed_here_is_told_and_stays(fetch, there, here):
    fetch()
    (here / SUBJECT).write_text("{}")
    for _ in range(2):
        said, (found,) = fetch(code=1)
        assert found["problems"] == [f"{SUBJECT}: its content changed"]
        assert "To resolve this for a run, remove its manifest.json" in said
        assert (here / SUBJECT).read_text() == "{}"
    (here / "manifest.json").unlink()
    fetch()
    assert contents(here) == contents(there)


def test_a_result_that_was_changed_on_the_cluster_is_told_and_does_not_arrive(fetch, there, here):
    fetch()
    good = contents(here)
    (there / SUBJECT).write_text("{}")
    assert fetch()[1][0].get("problems") is None
    assert contents(here) == good
    shutil.rmtree(here)
    (found,) = fetch(code=1)[1]
    assert found["problems"] == [f"on the cluster: {SUBJECT}: its content changed"]
    assert not here.exists()


def test_a_file_that_changes_while_it_is_fetched_is_hashed_again(cluster, fetch, there, here):
    before(cluster, 3, f"rm {there}/manifest.json; sed -i s/2.13.0/2.13.1/ {there}/{SUBJECT}; rm -f $0")
    (found,) = fetch()[1]
    assert "problems" not in found
    assert contents(here) == contents(there)


def test_a_run_that_ended_and_whose_file_changes_while_it_is_fetched_is_told(cluster, fetch, there, here):
    before(cluster, 0, f'test "$1" = 1 || printf "%s" "$1" > {there}/{SUBJECT}')
    going = support.prepare(cluster.there, support.cell(), repeat=2)
    found, other = fetch(code=1)[1]
    assert found["problems"][0].startswith("on the cluster: result.json: its content changed")
    assert "problems" not in other
    assert not here.exists()
    assert contents(cluster.here.runs / going.run_id) == contents(going.path)


def test_a_file_of_a_run_that_goes_on_and_is_written_anew_all_the_time_is_told_after_three_tries(cluster, fetch):
    going = support.prepare(cluster.there, support.cell(), repeat=2).path
    (going / "trace").mkdir()
    before(cluster, 0, f'echo "$1" > {going}/trace/rank-00000.json.gz')
    (_, found) = fetch(code=1)[1]
    assert "trace/rank-00000.json.gz: the file did not match the cluster's manifest in 3 tries" in found["problems"][0]
    assert connections(cluster) == 3 * 3
    assert not (cluster.here.runs / going.name).exists()


def test_a_file_that_grew_while_it_was_fetched_has_the_size_that_was_hashed(cluster, fetch):
    going = support.prepare(cluster.there, support.cell(), repeat=2)
    support.event(going, "started", 0)
    (going.path / "log").mkdir()
    log = going.path / "log/rank-00000.log"
    log.write_text("one\n")
    before(cluster, 3, f"echo two >> {log}")
    fetch()
    assert (cluster.here.runs / going.run_id / "log/rank-00000.log").read_text() == "one\n"
    assert connections(cluster) == 3
    fetch()
    assert (cluster.here.runs / going.run_id / "log/rank-00000.log").read_text() == "one\ntwo\n"
    assert log.read_text() == "one\ntwo\ntwo\n"


@pytest.mark.parametrize("kind", ["a symlink", "a FIFO", "a socket", "a device"])
def test_what_is_no_file_on_the_cluster_is_named_and_does_not_arrive(cluster, fetch, there, here, monkeypatch, kind):
    """Symlinks, FIFOs, sockets and devices on the cluster are named in a message and not copied."""
    path = there / "validation.jsonl"
    if kind == "a symlink":
        path.symlink_to("/etc/passwd")
        (there / "log").symlink_to("/etc")
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a socket":
        monkeypatch.chdir(there)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    elif os.geteuid():
        pytest.skip("needs root to make a device")
    else:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))
    said, (found,) = fetch(code=1)
    assert found["not_regular"]["validation.jsonl"] == kind
    assert f"{there.name}: validation.jsonl is {kind}; only regular files and folders with names in UTF-8 are fetched" in said
    assert not os.path.lexists(here / "validation.jsonl")
    assert not os.path.lexists(here / "log")
    assert set(contents(here)) == {name for name in contents(there) if name.startswith(("env", "ev", "r", "s"))}


@pytest.mark.parametrize("what", ["symlink", "pipe"])
def test_a_file_that_became_something_else_before_it_was_sent_does_not_arrive(cluster, fetch, there, here, victim, what):
    made = (
        f"ln -sf {victim}/file {there}/{SUBJECT}" if what == "symlink" else f"rm -f {there}/{SUBJECT}; mkfifo {there}/{SUBJECT}"
    )
    before(cluster, 3, made)
    fetch(code=1)
    assert not here.exists()
    assert not [path for path in cluster.here.path.rglob("*") if path.is_symlink()]


ANSWERS = {
    "a name of a folder elsewhere": b'[{"run": "../../victim", "state": "completed", "complete": false}]',
    "NUL in a name": b'[{"run": "a\\u0000b", "state": "completed", "complete": false}]',
    "a number for a name": b'[{"run": 1, "state": "completed", "complete": false}]',
    "no list": b'{"runs": []}',
    "a list of names": b'["a"]',
    "a key is missing": b'[{"run": "a"}]',
    "another type": b'[{"run": "a", "state": "completed", "complete": "yes"}]',
    "no JSON": b"Welcome to the cluster\n",
    "no text": b"\xff\xfe",
    "half an answer": b'[{"run": "a", "state"',
    "no end of brackets": b'[{"run": "a", "state": "completed", "complete": true, "other": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_cannot_be_used_is_told_in_a_sentence_and_changes_nothing(cluster, fetch, victim, answer):
    fetch()
    before = tree(cluster.here.path)
    (cluster.folder / "answer").write_bytes(ANSWERS[answer])
    said, document = fetch(code=1)
    assert document is None
    assert said.startswith("error: far: shardlab ")
    assert "cannot read the answer of `collect fetch` there" in said
    assert "Another release may be installed there." in said
    assert said.count("\n") == 1
    assert tree(cluster.here.path) == before


def test_a_name_that_ends_with_a_newline_is_refused(cluster, fetch):
    (cluster.folder / "answer").write_bytes(b'[{"run": "a\\n", "state": "completed", "complete": false}]')
    assert fetch(code=1)[0] == "error: far: 'a\\n' is not a run id. Allowed: ^[a-z0-9][a-z0-9._-]{0,63}$.\n"


def test_an_answer_that_is_too_large_is_told_in_a_sentence(cluster, fetch, monkeypatch):
    monkeypatch.setattr(remote_workspace, "MOST_BYTES", 1 << 20)
    (cluster.folder / "answer").write_bytes(b"[" + b" " * (2 << 20) + b"]")
    said, _ = fetch(code=1)
    assert "(more than 1 MiB)" in said


NAMES = (
    "../x",
    "../../../../victim/file",
    "/etc/x",
    "a/../../x",
    "",
    ".",
    "a//b",
    "a\nb",
    "a\x1b[2Jb",
    "manifest.json",
    "manifest.json/x",
    "result.json/x",
    ".hidden",
    "steps/.hidden/x",
    "a" * 1001,
)


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_that_names_a_file_elsewhere_is_refused(cluster, fetch, there, here, victim, name):
    fetch()
    shutil.rmtree(here)
    found = json.loads((there / "manifest.json").read_text())
    found["files"][name] = found["files"][SUBJECT]
    evil = cluster.folder / "evil.json"
    evil.write_text(json.dumps(found))
    before(cluster, 2, f"cp {evil} {there}/manifest.json")
    (told,) = fetch(code=1)[1]
    assert "which is not a valid file name in a run" in told["problems"][0]
    assert not here.exists()


@pytest.mark.parametrize("change", [{"run_id": "other"}, {"schema": 2}, {"files": []}, {"files": {"a": {"bytes": -1}}}])
def test_a_manifest_of_another_run_or_shape_is_refused(cluster, fetch, there, here, change):
    fetch()
    shutil.rmtree(here)
    evil = cluster.folder / "evil.json"
    evil.write_text(json.dumps(json.loads((there / "manifest.json").read_text()) | change))
    before(cluster, 2, f"cp {evil} {there}/manifest.json")
    assert re.search(r"the cluster's manifest (is not of this version|has schema)", fetch(code=1)[1][0]["problems"][0])
    assert not here.exists()


@pytest.mark.parametrize("place", [".", "log", "steps", "steps/rank-00000.jsonl", "manifest.json"])
def test_nothing_is_written_through_a_link_in_a_run_here(fetch, there, here, victim, place):
    (there / "log").mkdir()
    (there / "log/file").write_text("theirs")
    here.parent.mkdir()
    link = here if place == "." else here / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(victim if "." not in place[1:] and place != "manifest.json" else victim / "file")
    (found,) = fetch(code=1)[1]
    shown = here.name if place == "." else f"{here.name}/{place}"
    said = f"{shown} is a symlink on this machine, and collect fetch writes only to regular files and folders; remove it"
    assert found["problems"][0].startswith(said)
    link.unlink()
    fetch()
    assert contents(here) == contents(there)


@pytest.mark.parametrize("place", ["matrices", "matrices/quickstart.json", "last-matrix.json"])
def test_nothing_is_written_through_a_link_in_the_place_of_the_notes(cluster, fetch, victim, place):
    link = cluster.here.own / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim if place == "matrices" else victim / "file")
    said, _ = fetch(code=2)
    assert f".shardlab/{place} is a symlink, and collect fetch writes only to regular files and folders; remove it" in said


@pytest.mark.parametrize("name", ["matrices/quickstart.json", "last-matrix.json"])
def test_notes_of_another_version_are_told_and_those_here_stay(cluster, fetch, name):
    """If a file of the cluster's .shardlab has another format, an error names it and this machine keeps its own file."""
    fetch()
    before = (cluster.here.own / name).read_bytes()
    (cluster.there.own / name).write_text('{"schema": []}')
    said, _ = fetch(code=1)
    assert f"error: the cluster's .shardlab/{name} is not of this version" in said
    assert (cluster.here.own / name).read_bytes() == before


def test_a_second_command_waits_until_the_first_has_ended(cluster):
    command = [sys.executable, "-P", "-c", COMMAND, str(cluster.here.path), "0"]
    with (cluster.here.own / "fetch.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert next(line for line in waiting.stderr if "another collect fetch is transferring files" in line)
        time.sleep(0.1)
        assert waiting.poll() is None
        assert not (cluster.here.runs / ".incoming").exists()
    waiting.communicate()
    assert waiting.returncode == 0
