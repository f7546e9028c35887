"""`collect fetch` copies runs from a cluster to this machine: each copy is identical, whatever files already exist."""

import fcntl
import json
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
import time
from shlex import quote

import msgspec
import pytest
import support_collect as support
import zstandard
from support_fetch import COMMAND, Cluster, blocks, contents, tree

from collect.cli import main
from collect.fetching import progress
from collect.fetching.progress import TransferProgress
from shardlab.remote import remote_conversation, remote_workspace
from shardlab.runs import placement
from shardlab.runs.rundir import RunDir
from shardlab.transfer import arrival

SUBJECT = "result.json"
# Frames of zstd: one that does not say the size of its content, and one that says 1 byte and contains 200.
UNKNOWN_SIZE = zstandard.ZstdCompressor(write_content_size=False).compress(b"x")
TOO_MUCH = zstandard.compress(bytes(200)).replace(b"\xc8", b"\x01", 1)


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
    monkeypatch.setattr(progress, "QUIET_LIMIT_S", 3600.0)
    return made


@pytest.fixture
def victim(cluster, tmp_path):
    folder = tmp_path / "desk/victim"
    before = tree(folder)
    yield folder
    assert tree(folder) == before


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


def sent(cluster, fetch):
    """Run `collect fetch`, which must succeed. Returns the number of bytes that the cluster sends."""
    path = cluster.folder / "sent"
    path.write_bytes(b"")
    fetch()
    size = path.stat().st_size
    path.unlink()
    return size


def test_a_run_that_is_here_is_not_transferred_again(cluster, fetch, there, here):
    (found,) = fetch()[1]
    assert (found["complete"], found["hashed"]) == (True, found["files"])
    assert connections(cluster) == 1
    assert contents(here) == contents(there)
    (found,) = fetch()[1]
    assert (found["complete"], found["hashed"]) == (True, 0)
    assert connections(cluster) == 1


@pytest.mark.parametrize("left", ["log/old.log", ".old", "log/.rsync-partial/old"])
def test_files_of_an_earlier_transfer_do_not_get_into_a_new_run(cluster, fetch, there, here, left):
    """Files are copied to a folder in `.incoming`. It becomes the run folder if it has exactly the manifest's files."""
    path = cluster.here.runs / ".incoming/files" / there.name / left
    path.parent.mkdir(parents=True)
    path.write_text("old")
    fetch()
    assert contents(here) == contents(there)
    assert not (cluster.here.runs / ".incoming").exists()


def test_no_content_is_sent_from_storage_that_both_machines_see(cluster, fetch, there, here):
    (cluster.there.path / remote_workspace.MARK_FILE).write_text("far:/ws\n")
    (there / "trace").mkdir()
    (there / "trace/rank-00000.json.gz").write_bytes(os.urandom(300_000))
    assert sent(cluster, fetch) < 100_000
    assert contents(here) == contents(there)


def test_a_shared_file_that_vanishes_during_its_copy_is_reported(cluster, fetch, there, here, monkeypatch):
    """The cluster has hashed a file, and the file vanishes before this machine copies it."""
    (cluster.there.path / remote_workspace.MARK_FILE).write_text("far:/ws\n")
    opened = arrival._open_file

    def vanishes(path, how):
        if path.endswith(SUBJECT):
            (there / SUBJECT).unlink()
        return opened(path, how)

    monkeypatch.setattr(arrival, "_open_file", vanishes)
    (found,) = fetch(code=1)[1]
    assert found["problems"] == [f"{SUBJECT}: the file that arrived is not the file in the cluster's manifest"]
    assert not here.exists()


def test_a_wait_for_files_is_not_called_a_wait_for_the_list_of_runs(cluster, fetch, tmp_path, monkeypatch):
    offered = tmp_path / "offered"
    cluster.between(f"touch {quote(str(offered))}; sleep 0.5")

    def waits():
        assert not offered.exists()
        return False

    monkeypatch.setattr(TransferProgress, "make_wait_check", lambda *_: waits)
    fetch()
    assert offered.exists()


def test_a_partial_file_is_continued_where_its_transfer_stopped(cluster, fetch, there, here):
    (there / "trace").mkdir()
    (there / "trace/rank-00000.json.gz").write_bytes(os.urandom(2_000_000))
    cluster.fault(1, 1_500_000, "cut")
    done = cluster.fetch()
    assert done.returncode == 1
    assert "far: the transfer stopped: the connection broke" in done.stderr
    assert "0 of 1 runs are on this machine and were checked; run the same command again to continue." in done.stderr
    (part,) = cluster.here.path.rglob("rank-00000.json.gz")
    kept = part.stat().st_size
    assert 0 < kept < 2_000_000
    assert 0 < sent(cluster, fetch) - (2_000_000 - kept) < 100_000
    assert contents(here) == contents(there)


def test_only_new_records_are_sent(cluster, fetch):
    going = support.prepare(cluster.there, support.cell(), repeat=2)
    support.event(going, "started", 0)
    (going.path / "trace").mkdir()
    grows = going.path / "trace/rank-00000.json.gz"
    grows.write_bytes(os.urandom(1_000_000))
    assert sent(cluster, fetch) > 1_000_000
    with grows.open("ab") as file:
        file.write(os.urandom(1000))
    assert sent(cluster, fetch) < 100_000
    assert contents(cluster.here.runs / going.run_id) == contents(going.path)
    grows.write_bytes(os.urandom(1_000_000))  # another content of nearly the same size: nothing of the old content is kept
    assert sent(cluster, fetch) > 1_000_000
    assert contents(cluster.here.runs / going.run_id) == contents(going.path)


@pytest.mark.parametrize("cut", [False, True])
def test_text_is_compressed(cluster, fetch, there, here, cut):
    (there / "log").mkdir()
    chance = random.Random(1)
    lines = [f"step {number} loss 1.{chance.randrange(1000)}\n" for number in range(100_000)]
    (there / "log/rank-00000.log").write_text("".join(lines))
    if cut:
        cluster.fault(1, 100_000, "cut")
        assert cluster.fetch().returncode == 1
    assert sent(cluster, fetch) < 700_000 < (there / "log/rank-00000.log").stat().st_size
    assert contents(here) == contents(there)


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_files_have_their_times_and_entries_the_modes_of_new_entries(fetch, there, here, umask):
    (there / "trace/deep").mkdir(parents=True)
    (there / "trace/deep/x").write_bytes(b"x")
    os.utime(there / "trace/deep/x", ns=(0, 1_234_567_890_123_456_789))
    before = os.umask(umask)
    try:
        fetch()
    finally:
        os.umask(before)
    for path in [here, *here.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644) & ~umask, path
        if path.is_file() and path.name != "manifest.json":
            assert path.stat().st_mtime_ns == (there / path.relative_to(here)).stat().st_mtime_ns, path


def test_a_part_that_the_first_node_cannot_gather_is_reported(fetch, there, here):
    """The first node lacks the run's files of gpu1. `collect fetch` on this machine reports this too."""
    RunDir(there).write_event("step", placement.PLACED_EVENT, nodes=["gpu1"])
    said, (found,) = fetch(code=1)
    assert not found["complete"]
    assert found["parts"][0].startswith("the part of gpu1 is missing: ")
    assert f"{there.name}: the part of gpu1 is missing: " in said
    assert contents(here) == contents(there)


def test_a_running_run_is_fetched_again(cluster, fetch, there, here):
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
def test_a_run_that_an_older_release_fetched_partly_is_fetched_again(cluster, fetch, there, here, left):
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


def test_a_result_changed_on_this_machine_is_reported_and_kept(fetch, there, here):
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


def test_a_result_changed_on_the_cluster_is_reported_and_not_fetched(fetch, there, here):
    fetch()
    good = contents(here)
    (there / SUBJECT).write_text("{}")
    assert fetch()[1][0].get("problems") is None
    assert contents(here) == good
    shutil.rmtree(here)
    (found,) = fetch(code=1)[1]
    assert found["problems"] == [f"on the cluster: {SUBJECT}: its content changed"]
    assert not here.exists()


def test_a_file_that_changes_before_its_transfer_arrives_with_the_new_content(cluster, fetch, there, here):
    cluster.between(f'sed -i s/2.13.0/2.13.1/ {quote(str(there / SUBJECT))}; rm -f "$0"')
    (found,) = fetch()[1]
    assert "problems" not in found
    assert b"2.13.1" in contents(here)[SUBJECT]
    assert contents(here) == contents(there)


def test_a_file_of_an_ended_run_that_changes_during_the_fetch_is_reported(cluster, fetch, there, here):
    fetch()
    shutil.rmtree(here)
    cluster.between(f'printf "%s" x > {quote(str(there / SUBJECT))}')
    going = support.prepare(cluster.there, support.cell(), repeat=2)
    found, other = fetch(code=1)[1]
    assert found["problems"] == [f"on the cluster: {SUBJECT}: its content changed"]
    assert "problems" not in other
    assert not here.exists()
    assert contents(cluster.here.runs / going.run_id) == contents(going.path)


def test_a_file_of_an_ended_run_that_vanishes_before_its_transfer_is_reported(cluster, fetch, there, here):
    fetch()
    shutil.rmtree(here)
    going = support.prepare(cluster.there, support.cell(), repeat=2)
    (going.path / "trace").mkdir()
    (going.path / "trace/rank-00000.json.gz").write_bytes(b"x")
    cluster.between(f"rm {quote(str(there / SUBJECT))} {quote(str(going.trace_file(0)))}")
    found, other = fetch(code=1)[1]
    assert found["problems"] == [f"on the cluster: {SUBJECT}: the file is missing"]
    assert "problems" not in other
    assert contents(cluster.here.runs / going.run_id) == contents(going.path)


@pytest.mark.parametrize("kind", ["a symlink", "a FIFO", "a socket", "a device"])
def test_links_fifos_sockets_and_devices_are_named_and_not_copied(cluster, fetch, there, here, monkeypatch, kind):
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
def test_a_file_replaced_by_a_link_or_pipe_before_its_transfer_is_not_copied(cluster, fetch, there, here, victim, what):
    made = (
        f"ln -sf {victim}/file {there}/{SUBJECT}" if what == "symlink" else f"rm -f {there}/{SUBJECT}; mkfifo {there}/{SUBJECT}"
    )
    cluster.between(made)
    fetch(code=1)
    assert not here.exists()
    assert not [path for path in cluster.here.path.rglob("*") if path.is_symlink()]


OFFERS = {"runs": 1, "descriptions": {}}
OFFER = {"run": "a", "state": "completed", "complete": False}
ANSWERS = {
    "a name of a folder elsewhere": [OFFERS, OFFER | {"run": "../../victim"}],
    "NUL in a name": [OFFERS, OFFER | {"run": "a\0b"}],
    "a number for a name": [OFFERS, OFFER | {"run": 1}],
    "another message": [OFFER],
    "a list": [b'["a"]\n'],
    "a key is missing": [OFFERS, {"run": "a"}],
    "another type": [OFFERS, OFFER | {"complete": "yes"}],
    "a number of runs below 0": [OFFERS | {"runs": -1}],
    "no JSON": [b"Welcome to the cluster\n"],
    "no text": [b"\xff\xfe\n"],
    "nothing": [],
    "half an answer": [OFFERS, b'{"run": "a", "state"'],
    "fewer runs than it says": [OFFERS | {"runs": 2}, OFFER],
    "no end of brackets": [OFFERS, b'{"run": "a", "state": "completed", "complete": true, "other": ' + b"[" * 100_000 + b"\n"],
    "a manifest without files": [OFFERS, OFFER | {"manifest": {"schema": 1, "run_id": "a", "files": [], "complete": False}}],
    "a size below 0": [
        OFFERS,
        OFFER | {"manifest": {"schema": 1, "run_id": "a", "files": {"a": {"bytes": -1}}, "complete": False}},
    ],
    "no end of a run": [OFFERS, OFFER, {"type": "file", "name": "x", "begin": 0, "bytes": 1, "mtime_ns": 0}, blocks(b"x")],
    "half a block": [OFFERS, OFFER, {"type": "file", "name": "x", "begin": 0, "bytes": 1, "mtime_ns": 0}, b"\0\0\0\7x"],
    "an unknown message": [OFFERS, OFFER, {"type": "other"}],
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_invalid_answer_is_reported_in_a_sentence_and_changes_nothing(cluster, fetch, victim, answer):
    fetch()
    before = tree(cluster.here.path)
    cluster.answer(*ANSWERS[answer])
    said, document = fetch(code=1)
    assert document is None
    error = said.splitlines()[-1]
    assert error.startswith("error: far: shardlab ")
    assert "cannot read the answer of `collect fetch` there" in error
    assert "Another release may be installed there." in error
    shutil.rmtree(cluster.here.runs / ".incoming", ignore_errors=True)
    now = tree(cluster.here.path)
    assert now.pop("runs")[1] == before.pop("runs")[1]  # the staging folder was made there, so the time of the folder differs
    assert now == before


def test_a_name_that_ends_with_a_newline_is_refused(cluster, fetch):
    cluster.answer(OFFERS, OFFER | {"run": "a\n"})
    assert "Expected `str` matching regex '^[a-z0-9][a-z0-9._-]{0,63}\\\\Z' - at `$.run`" in fetch(code=1)[0]


def test_a_too_large_answer_is_reported_in_a_sentence(cluster, fetch, monkeypatch):
    monkeypatch.setattr(remote_conversation, "MOST_BYTES", 1 << 20)
    cluster.answer(b"[" + b" " * (2 << 20) + b"]\n")
    said, _ = fetch(code=1)
    assert "(more than 1 MiB in one line)" in said


def test_a_cluster_release_without_the_sending_program_is_named(cluster, fetch):
    """An older release on the cluster has no program that sends runs."""
    (cluster.there.path.parents[2] / "bin/python").write_text(
        '#!/bin/sh\necho "No module named collect.fetching.sender" >&2; exit 1\n'
    )
    (cluster.there.path.parents[2] / "bin/python").chmod(0o755)
    there = remote_workspace.read_remote_workspace(cluster.here)
    remote_workspace.write_remote_workspace(
        cluster.here, msgspec.structs.replace(there, python=str(cluster.folder / "bin/python"))
    )
    assert "Another release may be installed there." in fetch(code=1)[0]


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
    cluster.answer(OFFERS, OFFER | {"run": here.name, "manifest": found})
    (told,) = fetch(code=1)[1]
    assert "which is not a valid file name in a run" in told["problems"][0]
    assert not here.exists()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "result.json/x"])
def test_a_file_that_is_sent_under_a_name_elsewhere_is_refused(cluster, fetch, here, victim, name):
    begin = {"type": "file", "name": name, "begin": 0, "bytes": 3, "mtime_ns": 0}
    cluster.answer(OFFERS, OFFER | {"run": here.name}, begin, blocks(b"bad"))
    said, document = fetch(code=1)
    assert document is None
    assert "which is not a valid file name in a run" in said
    assert not here.exists()
    assert not [path for path in cluster.here.runs.rglob("*") if path.is_file()]


def test_a_file_in_the_place_of_a_folder_does_not_stop_the_next_command(cluster, fetch, there, here):
    begin = {"type": "file", "begin": 0, "bytes": 1, "mtime_ns": 0}
    files = [begin | {"name": "steps"}, blocks(b"x"), begin | {"name": "steps/rank-00000.jsonl"}, blocks(b"x")]
    cluster.answer(OFFERS, OFFER | {"run": here.name}, *files)
    said, document = fetch(code=1)
    assert document is None
    assert ".incoming" in said
    (cluster.folder / "answer").unlink()
    fetch()
    assert contents(here) == contents(there)


@pytest.mark.parametrize(
    ("begin", "content", "said"),
    [
        ({"begin": 5}, blocks(b"x"), "the cluster sends x from byte 5 on, which was not asked for"),
        ({}, b"\xff\xff\xff\xff", "the cluster sends a block of 4,294,967,295 bytes; allowed are "),
        ({"follows": 1 << 30}, b"", "the cluster sends a block of 1,073,741,824 bytes; allowed are "),
        ({"follows": 2, "is_compressed": True}, b"no", "the cluster sends x with a block that zstd cannot decompress"),
        ({"is_compressed": True}, blocks(b"no"), "the cluster sends x with a block that zstd cannot decompress"),
        (
            {"is_compressed": True},
            blocks(zstandard.compress(bytes(1 << 20))),
            "the cluster sends x with a block of 1,048,576 bytes; ",
        ),
        ({"is_compressed": True}, blocks(UNKNOWN_SIZE), "the cluster sends x with a block that does not say its size"),
        ({"is_compressed": True}, blocks(TOO_MUCH), "the cluster sends x with a block that zstd cannot decompress"),
        ({"is_compressed": True}, blocks(zstandard.compress(b"x") * 2), "the cluster sends x with a block that zstd cannot "),
    ],
)
def test_a_file_sent_from_a_wrong_offset_or_in_too_large_blocks_is_refused(cluster, fetch, here, begin, content, said):
    file = {"type": "file", "name": "x", "begin": 0, "bytes": 1, "mtime_ns": 0}
    cluster.answer(OFFERS, OFFER | {"run": here.name}, file | begin, content)
    assert f"error: far: {said}" in fetch(code=1)[0]
    assert not here.exists()


def test_a_file_with_another_content_than_in_the_manifest_is_refused(cluster, fetch, here):
    file = {"bytes": 1, "mtime_ns": 0, "sha256": "0" * 64}
    manifest = {"schema": 1, "run_id": here.name, "files": {"x": file}, "complete": False}
    begin = {"type": "file", "name": "x", "begin": 0, "bytes": 1, "mtime_ns": 0}
    cluster.answer(OFFERS, OFFER | {"run": here.name}, begin, blocks(b"x"), {"type": "end", "manifest": manifest})
    (found,) = fetch(code=1)[1]
    assert found["problems"] == ["x: the file that arrived is not the file in the cluster's manifest"]
    assert not here.exists()


def test_a_file_that_is_sent_twice_is_refused(cluster, fetch, here):
    """On a file system where `x` and `X` are the same file, the second would replace the first."""
    file = {"type": "file", "name": "x", "begin": 0, "bytes": 1, "mtime_ns": 0, "follows": 1}
    cluster.answer(OFFERS, OFFER | {"run": here.name}, file, b"x", file, b"y")
    assert "File exists" in fetch(code=1)[0]
    assert not here.exists()


def test_a_run_without_files_is_fetched(cluster, fetch, here):
    manifest = {"schema": 1, "run_id": here.name, "files": {}, "complete": False}
    cluster.answer(OFFERS, OFFER | {"run": here.name}, {"type": "end", "manifest": manifest})
    (found,) = fetch(code=1)[1]  # 1: it has no run.json, so nothing is known of it
    assert (found["files"], found.get("problems", [])) == (0, [])
    assert [path.name for path in here.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("change", [{"run_id": "other"}, {"schema": 2}])
@pytest.mark.parametrize("is_offered", [False, True])
def test_a_manifest_of_another_run_or_version_is_refused(cluster, fetch, here, change, is_offered):
    manifest = {"schema": 1, "run_id": here.name, "files": {}, "complete": False} | change
    end = {"type": "end", "manifest": None if is_offered else manifest}
    cluster.answer(OFFERS, OFFER | {"run": here.name} | ({"manifest": manifest} if is_offered else {}), end)
    (found,) = fetch(code=1)[1]
    assert found["problems"][0].startswith("the cluster's manifest has schema")
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
    link = cluster.here.shardlab_folder / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim if place == "matrices" else victim / "file")
    said, _ = fetch(code=2)
    assert f".shardlab/{place} is a symlink, and collect fetch writes only to regular files and folders; remove it" in said


@pytest.mark.parametrize("name", ["matrices/quickstart.json", "last-matrix.json"])
def test_a_note_of_another_version_is_reported_and_the_local_note_kept(cluster, fetch, name):
    """If a file of the cluster's .shardlab has another format, an error names it and this machine keeps its own file."""
    fetch()
    before = (cluster.here.shardlab_folder / name).read_bytes()
    (cluster.there.shardlab_folder / name).write_text('{"schema": []}')
    said, _ = fetch(code=1)
    assert f"error: the cluster's .shardlab/{name} is not of this version" in said
    assert (cluster.here.shardlab_folder / name).read_bytes() == before


def test_a_second_command_waits_until_the_first_has_ended(cluster):
    command = [sys.executable, "-P", "-c", COMMAND, str(cluster.here.path), "0"]
    with (cluster.here.shardlab_folder / "fetch.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert next(line for line in waiting.stderr if "another collect fetch is transferring files" in line)
        time.sleep(0.1)
        assert waiting.poll() is None
        assert not (cluster.here.runs / ".incoming").exists()
    waiting.communicate()
    assert waiting.returncode == 0
