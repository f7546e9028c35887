"""The program that offers runs and hashes them: what it does with files that change meanwhile, and what it refuses."""

import errno
import hashlib
import io
import json
import os

import pytest
import support_collect as support

from collect.fetching import manifest
from collect.fetching.sender import Sender
from shardlab.errors import InputError, WorkspaceError
from shardlab.workspace.workspace import Workspace

SIZE = 400_000
NAME = "trace/rank-00000.json.gz"


class Pipe(io.BytesIO):
    """Keeps what is written. `hook` is called once, when the files of a run have been listed."""

    def __init__(self, hook=lambda: None):
        super().__init__()
        self.hook = hook

    def flush(self):
        if b'{"files":' in self.getvalue():
            hook, self.hook = self.hook, lambda: None
            hook()


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


def serve(run, target, *, asked=None, wanted=None):
    """Run the program. Returns its last two messages: the files that are listed, and the result of the check."""
    messages = ({"patterns": []} if asked is None else asked, wanted or {"runs": [run.run_id]})
    lines = "".join(f"{json.dumps(line)}\n" for line in messages)
    Sender(Workspace(run.path.parents[1]), io.BytesIO(lines.encode()), target).serve()
    listed, checked = (json.loads(line) for line in target.getvalue().splitlines()[-2:])
    return listed["files"], checked


def test_records_that_are_appended_after_the_files_were_listed_are_not_hashed(run):
    path = run.path / NAME
    before = path.read_bytes()

    def grow():
        with path.open("ab") as file:
            file.write(b"more")

    sizes, checked = serve(run, Pipe(grow))
    assert path.read_bytes() == before + b"more"
    assert sizes[NAME] == SIZE
    listed = checked["manifest"]["files"][NAME]
    assert (listed["bytes"], listed["sha256"]) == (SIZE, hashlib.sha256(before).hexdigest())
    assert NAME in manifest.read(run).files


def test_a_file_that_is_replaced_after_the_files_were_listed_is_named(run):
    path = run.path / NAME

    def replace():
        path.with_name("new").write_bytes(os.urandom(SIZE + 1))
        path.with_name("new").rename(path)

    checked = serve(run, Pipe(replace))[1]
    assert checked["problems"] == [f"{NAME}: its content changed"]
    assert manifest.read(run) is None


def test_a_file_that_is_removed_after_the_files_were_listed_is_left_out(run):
    checked = serve(run, Pipe((run.path / NAME).unlink))[1]
    assert checked["problems"] == []
    assert set(checked["manifest"]["files"]) >= {"run.json", "events.attempt.jsonl"}
    assert NAME not in checked["manifest"]["files"]


def test_a_run_with_a_file_that_cannot_be_read_has_no_manifest(run, monkeypatch):
    compute_digest = manifest.compute_digest

    def fails(path, length):
        if str(path).endswith(NAME):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return compute_digest(path, length)

    monkeypatch.setattr(manifest, "compute_digest", fails)
    checked = serve(run, Pipe())[1]
    assert "Input/output error" in checked["problems"][0]
    assert checked["manifest"] is None
    assert manifest.read(run) is None


def test_a_run_is_sent_also_if_its_manifest_cannot_be_stored_on_the_cluster(run, monkeypatch):
    def full(*_):
        raise WorkspaceError("the disk is full")

    monkeypatch.setattr(manifest, "write", full)
    checked = serve(run, Pipe())[1]
    assert checked["problems"] == []
    assert NAME in checked["manifest"]["files"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ({"asked": []}, "standard input: is not a message of this version"),
        ({"asked": {"patterns": ["x*"]}}, "x\\*"),
        ({"wanted": {"runs": 1}}, "standard input: is not a message of this version"),
        ({"wanted": {"runs": ["../x"]}}, "'../x' was not offered"),
    ],
)
def test_a_message_that_is_not_allowed_is_refused(run, messages, said):
    with pytest.raises(InputError, match=said):
        serve(run, Pipe(), **messages)
