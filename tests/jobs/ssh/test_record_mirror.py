"""The first node keeps copies of the records of the other nodes: which files are copied while they grow, and which files a node
is not allowed to write."""

import os
import shutil
import sys

import pytest

from jobs.ssh import node_task
from jobs.ssh.node_task import RecordSender
from jobs.ssh.record_mirror import RecordChange, RecordCopies, RecordReader
from jobs.ssh.step import NodeSession
from shardlab.errors import ShardlabError
from shardlab.runs.rundir import RunDir
from shardlab.workspace.inventory import InventoryNode

HOSTILE = [
    "../x", "/etc/passwd", "claim/job", "run.json", "events.attempt.jsonl", "events.step.jsonl", "steps/../run.json", "job.sh",
    "log/job.log", "env/../x.json", "checkpoints/step-1/manifest.json", "result.json\n", "steps/rank-0.jsonl",
]  # fmt: skip


@pytest.fixture
def copied(tmp_path):
    """Returns (the folder of a node, the folder of the first node, a function). The function copies what has changed in the
    node's folder and returns the names of the files whose content was sent."""
    node, first = tmp_path / "node", tmp_path / "first"
    (node / "steps").mkdir(parents=True)
    first.mkdir()
    reader, copies = RecordReader(node), RecordCopies(first)

    def copy():
        changes = list(reader.read_changes())
        for change in changes:
            copies.apply_change("gpu1", change)
        return [change.name for change in changes]

    return node, first, copy


def test_appended_records_are_sent_once(copied):
    node, first, copy = copied
    path = node / "steps/rank-00003.jsonl"
    path.write_text("a\n")
    assert copy() == ["steps/rank-00003.jsonl", ""]
    assert copy() == []
    with path.open("a") as handle:
        handle.write("b" * 100_000 + "\n")
    assert copy() == ["steps/rank-00003.jsonl"] * 2 + [""]
    assert (first / "steps/rank-00003.jsonl").read_text() == path.read_text()


def test_a_file_that_was_replaced_is_sent_from_its_beginning(copied):
    node, first, copy = copied
    path = node / "steps/rank-00003.jsonl"
    path.write_text("a long record\n")
    copy()
    (node / "new").write_text("short\n")
    (node / "new").rename(path)
    copy()
    assert (first / "steps/rank-00003.jsonl").read_text() == "short\n"


def test_the_result_comes_last_and_other_files_stay_on_the_node(copied):
    node, _, copy = copied
    names = [
        "events.gpus-n1.jsonl",
        "events.node-n1.jsonl",
        "events.rank-00001.jsonl",
        "events.ranks.jsonl",
        "result.json",
        "validation.jsonl",
    ]
    for name in [*names, "events.attempt.jsonl", "run.json"]:
        (node / name).write_text("{}\n")
    (node / "steps/rank-00001.jsonl").write_text("{}\n")
    sent = copy()
    assert sent[-2:] == ["result.json", ""]
    assert sorted(sent[:-1]) == sorted([*names, "steps/rank-00001.jsonl"])


def test_the_manifest_of_a_checkpoint_goes_when_the_checkpoint_goes(copied):
    node, first, copy = copied
    saved = node / "checkpoints/step-00000005"
    saved.mkdir(parents=True)
    for name in ("manifest.json", "rank-00000.bin"):
        (saved / name).write_text("{}")
    copy()
    here = first / "checkpoints/step-00000005"
    assert [path.name for path in here.iterdir()] == ["manifest.json"]
    shutil.rmtree(saved)
    copy()
    assert not here.exists()


def test_the_first_nodes_own_part_of_a_checkpoint_stays(copied):
    node, first, copy = copied
    for place, name in ((node, "manifest.json"), (first, "rank-00002.bin")):
        (place / "checkpoints/step-00000005").mkdir(parents=True)
        (place / "checkpoints/step-00000005" / name).write_text("{}")
    copy()
    shutil.rmtree(node / "checkpoints")
    copy()
    assert [path.name for path in (first / "checkpoints/step-00000005").iterdir()] == ["rank-00002.bin"]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_node_writes_another_file(tmp_path, name):
    with pytest.raises(ShardlabError, match="gpu1: sent the file"):
        RecordCopies(tmp_path / "run").apply_change("gpu1", RecordChange(name, b"x"))
    assert not list(tmp_path.rglob("*"))


STEPS = "steps/rank-00000.jsonl"


@pytest.mark.parametrize("change", [RecordChange(STEPS, b"x", 0), RecordChange(STEPS, None), RecordChange(STEPS, b"", 4)])
@pytest.mark.parametrize("owner", ["gpu1", "the first node"])
def test_no_node_changes_the_records_of_another_node(tmp_path, owner, change):
    copies = RecordCopies(tmp_path)
    if owner == "gpu1":
        copies.apply_change("gpu1", RecordChange(STEPS, b"mine"))
    else:
        (tmp_path / "steps").mkdir()
        (tmp_path / STEPS).write_text("mine")
    with pytest.raises(ShardlabError, match=f"gpu2: sent the file {STEPS}, which {owner} writes"):
        copies.apply_change("gpu2", change)
    assert (tmp_path / STEPS).read_text() == "mine"


def test_records_of_a_node_have_no_holes(tmp_path):
    copies = RecordCopies(tmp_path)
    copies.apply_change("gpu1", RecordChange(STEPS, b"12345"))
    copies.apply_change("gpu1", RecordChange(STEPS, b"67", 5))
    with pytest.raises(ShardlabError, match=r"gpu1: sent byte 8 of rank-00000\.jsonl, of which this node has 7 bytes"):
        copies.apply_change("gpu1", RecordChange(STEPS, b"x", 8))
    copies.apply_change("gpu1", RecordChange(STEPS, b"x", 2))
    assert (tmp_path / STEPS).read_text() == "12x"


def read_all(session):
    while session.read_output():
        pass


@pytest.mark.parametrize(
    "words",
    [
        '{"name": "steps/rank-00000.jsonl", "content": "eA==", "first_byte": -1}',
        '{"name": 7}',
        '{"other": ' + "[" * 5000,
        "\xff",
        "",
    ],
    ids=["negative", "number", "nested", "no JSON", "empty"],
)
def test_a_line_of_a_node_that_is_no_record_is_a_sentence(tmp_path, monkeypatch, words):
    (tmp_path / "run/log").mkdir(parents=True)
    (tmp_path / "line").write_text(f"shardlab: record {words}\nshardlab: exit 0\n", encoding="latin-1")
    script = '#!/bin/sh\nfor word; do test "$word" != -G || exec /usr/bin/ssh "$@"; done\ncat LINE\n'
    (tmp_path / "ssh").write_text(script.replace("LINE", str(tmp_path / "line")))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run = tmp_path / "run"
    session = NodeSession(InventoryNode("gpu1", "127.0.0.1", python="python3"), RunDir(run), RecordCopies(run))
    with pytest.raises(ShardlabError, match="gpu1: sent a record that cannot be read"):
        read_all(session)
    session.ask_to_end()
    session.process.wait()
    session.stdout.close()
    assert [path.name for path in run.iterdir()] == ["log"]


def test_records_without_a_reader_are_given_up_with_a_sentence(tmp_path, monkeypatch):
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    while True:
        try:
            os.write(writes, bytes(4096))
        except BlockingIOError:
            break
    os.set_blocking(writes, True)
    (tmp_path / "result.json").write_text("{}")
    with os.fdopen(writes, "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(node_task, "MOST_SEND_S", 0.1)
        sender = RecordSender(tmp_path)
        with pytest.raises(ShardlabError, match=r"the last records could not be sent within 0\.1 s"):
            sender.finish()
        os.close(reads)  # lets the sender's thread end
        sender._thread.join()
