"""The copies of a node's records on the first node: what is copied, as it grows, and what no node may write."""

import shutil

import pytest

from jobs.ssh import record_mirror
from jobs.ssh.record_mirror import RecordChange, RecordReader
from shardlab.errors import ShardlabError

HOSTILE = [
    "../x", "/etc/passwd", "claim/job", "run.json", "events.attempt.jsonl", "events.step.jsonl", "steps/../run.json", "job.sh",
    "log/job.log", "env/../x.json", "checkpoints/step-1/manifest.json", "result.json\n", "steps/rank-0.jsonl",
]  # fmt: skip


@pytest.fixture
def copied(tmp_path):
    """Copies what changed; the names of the files that were sent."""
    node, first = tmp_path / "node", tmp_path / "first"
    (node / "steps").mkdir(parents=True)
    first.mkdir()
    reader = RecordReader(node)

    def copy():
        changes = list(reader.changes())
        for change in changes:
            record_mirror.apply(first, "gpu1", change)
        return [change.name for change in changes]

    return node, first, copy


def test_what_was_added_is_sent_once(copied):
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
        record_mirror.apply(tmp_path / "run", "gpu1", RecordChange(name, b"x"))
    assert not list(tmp_path.rglob("*"))
