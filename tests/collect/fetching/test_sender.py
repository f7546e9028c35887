"""The program that sends runs: what it sends of files that change while they are sent, and what it refuses."""

import errno
import hashlib
import io
import json
import os

import pytest
import support_collect as support

from collect.fetching.sender import RunSender
from shardlab.errors import InputError, WorkspaceError
from shardlab.transfer import manifest
from shardlab.workspace.workspace import Workspace

SIZE = 400_000
NAME = "trace/rank-00000.json.gz"


class Pipe(io.BytesIO):
    """Keeps what is written. `hook` is called once, when the first bytes of the file NAME are written."""

    def __init__(self, hook=lambda: None):
        super().__init__()
        self.hook = hook

    def write(self, content):
        count = super().write(content)
        if NAME.encode() in self.getvalue():
            hook, self.hook = self.hook, lambda: None
            hook()
        return count


@pytest.fixture
def run(tmp_path):
    """A run that goes on, with one large file."""
    workspace = Workspace(tmp_path)
    support.keep(workspace, [support.cell()], repeats=1)
    made = support.prepare(workspace, support.cell())
    support.event(made, "started", 0)
    path = made.path / NAME
    path.parent.mkdir()
    path.write_bytes(os.urandom(SIZE))
    return made


def serve(run, target, *, held=None, is_shared=False, asked=None, wanted=None):
    """Run the program. Returns (the content that was sent of the file NAME or None, where it begins, the last message)."""
    workspace = Workspace(run.path.parents[1])
    asked = {"patterns": []} if asked is None else asked
    wanted = wanted or {"runs": [{"run": run.run_id, "names": None, "held": held or {}}], "is_shared": is_shared}
    RunSender(
        workspace, io.BytesIO("".join(f"{json.dumps(line)}\n" for line in (asked, wanted)).encode()), target
    ).serve_requests()
    stream = io.BytesIO(target.getvalue())
    for _ in range(1 + json.loads(stream.readline())["runs"]):
        message = json.loads(stream.readline())
    content, begin = None, 0
    while message["type"] == "file":
        received = b""
        if "follows" in message:
            received = stream.read(message["follows"])
        elif not is_shared:
            while length := int.from_bytes(stream.read(4), "big"):
                received += stream.read(length)
        if message["name"] == NAME:
            content, begin = received, message["begin"]
        message = json.loads(stream.readline())
    assert message["type"] == "end"
    assert stream.read() == b""
    return content, begin, message


def test_records_that_are_appended_while_the_file_is_sent_are_not_sent(run):
    path = run.path / NAME
    before = path.read_bytes()

    def grow():
        with path.open("ab") as file:
            file.write(b"more")

    content, _, end = serve(run, Pipe(grow))
    assert path.read_bytes() == before + b"more"
    assert content == before
    listed = end["manifest"]["files"][NAME]
    assert (listed["bytes"], listed["sha256"]) == (SIZE, hashlib.sha256(before).hexdigest())
    assert NAME in manifest.read_manifest(run).files


def test_the_content_that_was_sent_is_in_the_manifest_if_the_file_becomes_shorter(run):
    content, _, end = serve(run, Pipe(lambda: os.truncate(run.path / NAME, 10)))
    listed = end["manifest"]["files"][NAME]
    assert 10 <= len(content) < SIZE
    assert (listed["bytes"], listed["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("left", [0, 10])
def test_a_small_file_that_became_shorter_is_sent_as_it_is_now(run, monkeypatch, left):
    path, preadv = run.path / NAME, os.preadv
    path.write_bytes(os.urandom(1000))

    def shortened(descriptor, buffers, offset):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            os.truncate(path, left)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", shortened)
    content, _, end = serve(run, Pipe())
    assert content == path.read_bytes()
    assert len(content) == left
    listed = end["manifest"]["files"][NAME]
    assert (listed["bytes"], listed["sha256"]) == (left, hashlib.sha256(content).hexdigest())


def test_a_file_that_cannot_be_read_further_is_named_and_the_others_are_sent(run, monkeypatch):
    preadv = os.preadv

    def fails(descriptor, buffers, offset):
        if offset > 200_000:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails)
    content, _, end = serve(run, Pipe())
    assert 0 < len(content) < SIZE
    assert end["problems"][0].startswith(f"{NAME}: ")
    assert "Input/output error" in end["problems"][0]
    assert set(end["manifest"]["files"]) >= {"run.json", "events.attempt.jsonl"}
    assert NAME not in end["manifest"]["files"]
    assert manifest.read_manifest(run) is None


def test_a_run_is_sent_also_if_its_manifest_cannot_be_stored_on_the_cluster(run, monkeypatch):
    def full(*_):
        raise WorkspaceError("the disk is full")

    monkeypatch.setattr(manifest, "write_manifest", full)
    content, _, end = serve(run, Pipe())
    assert content == (run.path / NAME).read_bytes()
    assert end["problems"] == []


@pytest.mark.parametrize("count", [1, 1000, SIZE - 1])
def test_bytes_that_the_other_machine_has_are_not_sent(run, count):
    whole = (run.path / NAME).read_bytes()
    held = {NAME: {"bytes": count, "sha256": hashlib.sha256(whole[:count]).hexdigest()}}
    content, begin, end = serve(run, Pipe(), held=held)
    assert (begin, content) == (count, whole[count:])
    assert end["manifest"]["files"][NAME]["sha256"] == hashlib.sha256(whole).hexdigest()


def test_a_file_that_the_other_machine_has_completely_is_not_mentioned(run):
    digest = hashlib.sha256((run.path / NAME).read_bytes()).hexdigest()
    content, _, end = serve(run, Pipe(), held={NAME: {"bytes": SIZE, "sha256": digest}})
    assert content is None
    assert end["manifest"]["files"][NAME]["sha256"] == digest


@pytest.mark.parametrize("held", [(1000, b"other"), (SIZE + 1, b"longer"), (0, b"")])
def test_a_file_is_sent_completely_if_the_other_machine_has_other_content(run, held):
    whole = (run.path / NAME).read_bytes()
    size, content = held
    held = {NAME: {"bytes": size, "sha256": hashlib.sha256(content).hexdigest()}}
    assert serve(run, Pipe(), held=held)[:2] == (whole, 0)


def test_no_content_is_sent_if_both_machines_see_the_file(run):
    content, begin, end = serve(run, Pipe(), is_shared=True)
    assert (content, begin) == (b"", 0)
    assert end["manifest"]["files"][NAME]["bytes"] == SIZE


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ({"asked": []}, "standard input: is not a message of this version"),
        ({"asked": {"patterns": ["x*"]}}, "x\\*"),
        ({"wanted": {"runs": 1, "is_shared": False}}, "standard input: is not a message of this version"),
        ({"wanted": {"runs": [{"run": "../x", "names": None, "held": {}}], "is_shared": False}}, "'../x' was not offered"),
    ],
)
def test_a_message_that_is_not_allowed_is_refused(run, messages, said):
    with pytest.raises(InputError, match=said):
        serve(run, Pipe(), **messages)


@pytest.mark.parametrize("name", ["../../.shardlab/last-matrix.json", "/etc/passwd", "run.json/../run.json"])
def test_a_file_outside_of_the_run_is_not_sent(run, name):
    target = Pipe()
    _, _, end = serve(run, target, wanted={"runs": [{"run": run.run_id, "names": [name], "held": {}}], "is_shared": False})
    assert end["manifest"]["files"] == {}
    assert b'"type":"file"' not in target.getvalue()
