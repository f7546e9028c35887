"""Files of records (one JSON line each) are read as far as they are intact, and damaged lines are counted."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.errors import WorkspaceError
from shardlab.files import files
from shardlab.runs.record import Event, LineWriter, StepRecord, find_damaged_line, read_records

STEP = StepRecord(schema=1, step=1, t_s=1.0, wall_s=2.0, loss=0.5, units=8, step_ms=3.0)


def written(path, count):
    with LineWriter(path) as lines:
        for step in range(1, count + 1):
            lines.write_record(StepRecord(schema=1, step=step, t_s=1.0, wall_s=2.0, loss=0.5, units=8, step_ms=3.0))
    return path.read_bytes()


def test_an_unknown_field_is_absent_and_never_zero(tmp_path):
    """A field without a value is not written to the record."""
    raw = written(tmp_path / "s.jsonl", 1)
    assert b"allocated_bytes" not in raw
    assert b"warmup" not in raw


@given(cut=st.integers(1, 400))
def test_a_torn_last_line_is_noted_wherever_it_is_cut(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("r") / "s.jsonl"
    raw = written(path, 3)
    path.write_bytes(raw[:-cut] if cut < len(raw) else b"{")
    whole = path.read_bytes().count(b"}")
    found = read_records(path, StepRecord)
    assert [record.step for record in found.records] == list(range(1, whole + 1))
    assert found.is_truncated == (not path.read_bytes().endswith((b"}", b"\n")) and path.stat().st_size > 0)
    assert found.corrupt == 0


def test_bad_lines_are_counted_and_the_rest_is_read(tmp_path):
    path = tmp_path / "s.jsonl"
    first, second, third = written(path, 3).splitlines(keepends=True)
    path.write_bytes(first + b"\xff\xfe garbage\n" + second + b'{"schema":1,"step":"x"}\n' + b'{"loss": NaN}\n' + third)
    found = read_records(path, StepRecord)
    assert [record.step for record in found.records] == [1, 2, 3]
    assert (found.corrupt, found.is_truncated) == (3, False)


def test_a_line_that_is_nested_too_deeply_is_a_bad_line_like_any_other(tmp_path):
    """A hostile node could write such a line. It must be counted as damaged and not stop a command that reads all runs."""
    path = tmp_path / "events.rank.jsonl"
    good = b'{"schema":1,"event":"started","writer":"attempt","wall_s":1.0,"host":"h"}\n'
    deep = good.replace(b'"host":"h"', b'"host":"h","data":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    path.write_bytes(good + deep + good)
    found = read_records(path, Event)
    assert (len(found.records), found.corrupt, found.is_truncated) == (2, 1, False)
    assert find_damaged_line(path, Event) == (2, "its values are nested too deeply")
    path.write_bytes(good + deep.rstrip(b"\n"))
    found = read_records(path, Event)
    assert (len(found.records), found.corrupt, found.is_truncated) == (1, 0, True)


@pytest.mark.parametrize(
    "lines",
    [(0, 1, 2), (0, b"", 1), (0, (1, 2), b""), ((0, 1), b" ", 2), (0, b"{", 1), (b" ", 0, 1), (0, "split", (1, 2))],
    ids=["whole", "empty line", "two on a line", "two and blank", "begun", "blank first", "split over two lines"],
)
def test_a_file_is_read_as_its_lines_are(tmp_path, lines):
    """The reader judges each line alone: it must not accept a record that is split over two lines, nor two records on one
    line."""
    path = tmp_path / "s.jsonl"
    records = written(path, 3).splitlines()
    spelled = {"split": records[0].replace(b",", b",\n", 1)}
    parts = [b"".join(records[i] for i in line) if isinstance(line, tuple) else spelled.get(line, line) for line in lines]
    parts = [records[part] if isinstance(part, int) else part for part in parts]
    path.write_bytes(b"".join(part + b"\n" for part in parts))
    alone = [line in records for line in path.read_bytes().split(b"\n")[:-1]]
    found = read_records(path, StepRecord)
    assert (len(found.records), found.corrupt, found.is_truncated) == (sum(alone), len(alone) - sum(alone), False)


def test_a_new_writer_does_not_join_its_line_to_a_torn_one(tmp_path):
    path = tmp_path / "s.jsonl"
    raw = written(path, 2)
    path.write_bytes(raw[:-5])
    written(path, 1)
    found = read_records(path, StepRecord)
    assert [record.step for record in found.records] == [1, 1]
    assert found.corrupt == 1


def test_a_missing_file_has_no_records(tmp_path):
    assert read_records(tmp_path / "none.jsonl", Event).records == []


def test_a_kill_loses_no_line_that_was_written(tmp_path):
    path = tmp_path / "s.jsonl"
    code = (
        "import sys; from pathlib import Path; from shardlab.runs.record import *\n"
        f"lines = LineWriter(Path({str(path)!r}))\n"
        "for step in range(10**6):\n"
        "    lines.write_record(StepRecord(schema=1, step=step, t_s=1.0, wall_s=2.0, loss=0.5, units=8, step_ms=3.0))\n"
        "    if step == 500: print('go', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"go\n"
        process.send_signal(signal.SIGKILL)
    found = read_records(path, StepRecord)
    assert len(found.records) > 500
    assert [record.step for record in found.records] == list(range(len(found.records)))
    assert found.corrupt == 0


def test_a_full_disk_is_one_sentence(tmp_path):
    writer = LineWriter(tmp_path / "full")
    with Path("/dev/full").open("ab") as full:
        os.dup2(full.fileno(), writer._descriptor)
    with pytest.raises(WorkspaceError, match="the disk is full; free some space"):
        writer.write_record(STEP)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path.with_name("victim"))])
def test_records_are_not_appended_to_a_link_a_fifo_or_a_folder(tmp_path, make):
    (tmp_path / "victim").write_text("mine")
    make(tmp_path / "events.jsonl")
    with pytest.raises(WorkspaceError, match=r"cannot write .*events.jsonl: "):
        LineWriter(tmp_path / "events.jsonl").write_record(STEP)
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": 1})
    before = path.read_bytes()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WorkspaceError, match=r"cannot write .*a\.json: the disk is full"):
        files.write_json(path, {"a": 2})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
