"""From a damaged trace, shardlab reads every event that is intact and counts every event that is not."""

import gzip
import json

import pytest
import support_traces as support
from hypothesis import given, settings
from hypothesis import strategies as st

from collect.traces import file_figures, trace


def complete(count: int = 8) -> list[dict]:
    """Returns `count` events, each with its own name."""
    one = {
        "ph": "X",
        "cat": "cpu_op",
        "pid": 1,
        "tid": 1,
        "dur": 5,
        "args": {"Input Dims": [[1, 2], []], "of": [{"a": 1}, {"b": 2}]},
    }
    return [one | {"name": f"op {index}", "ts": support.NEW + 1000 * index} for index in range(count)]


def read(path, content: bytes) -> trace.Trace:
    path.write_bytes(content)
    return trace.read_trace(path)


def names(found: trace.Trace) -> list[str]:
    return [found.labels[label] for label in found.name]


@pytest.mark.parametrize("pretty", [True, False])
def test_a_cut_trace_gives_every_whole_event_and_says_that_it_is_cut(tmp_path, pretty):
    events = complete()
    content = support.text(events, pretty=pretty)
    ends = [_bounds(content, event["name"])[1] for event in events]
    for at in range(len(content)):
        found = read(tmp_path / "t.json", content[:at])
        whole = sum(end <= at for end in ends)
        assert names(found) == [f"op {index}" for index in range(whole)]
        listed = content.rindex(b"]", 0, content.rindex(b"traceName") if pretty else len(content)) < at
        assert bool(found.cut_reason) != listed, at
        begun = content[:at].count(b'"ph"')
        # The text may be cut within the last event before the key "ph", by which `begun` counts events.
        assert whole + found.lost_counts.get("not readable", 0) in (begun, begun + 1)


def _bounds(content: bytes, name: str) -> tuple[int, int]:
    """Returns the positions in the text of a trace where an event begins and ends. name: the name of the event."""
    inside = content.index(f'"{name}"'.encode())
    start = content.rindex(b"{", 0, content.rindex(b'"ph"', 0, inside))
    return start, start + json.JSONDecoder().raw_decode(content[start:].decode())[1]


@pytest.mark.parametrize(
    ("damage", "instead", "reason"),
    [
        (b'"op 3"', b'"op "3"', "not readable"),
        (b'"op 3"', b'"op 3', "not readable"),
        (b'"op 3"', b'"op\x003"', "not readable"),
        (b'"name": "op 3",', b'"name": "op 3"', "not readable"),
        (
            b'"ph": "X",\n    "cat": "cpu_op",\n    "pid": 1,\n    "tid": 1,\n    "dur": 0.005',
            b'"dur": 0.005',
            "without a known phase (ph)",
        ),
        (b'"name"', b'"game"', "without a name or category"),
        (b'"cat"', b'"cut"', "without a name or category"),
        (b'"dur": 0.005', b'"dur": NaN', "without a time or with a negative duration"),
        (b'"dur": 0.005', b'"dur": -inf', "without a time or with a negative duration"),
        (b'"dur": 0.005', b'"dur": -0.005', "without a time or with a negative duration"),
        (b'"dur": 0.005', b'"dur": "5 ns"', "without a time or with a negative duration"),
        (b'"dur": 0.005', b'"dur": true', "without a time or with a negative duration"),
        (b'"dur": 0.005', b'"dur": null', "without a time or with a negative duration"),
        (b'"dur": 0.005,', b"", "without a time or with a negative duration"),
        (b'"ph": "X"', b'"ph": "\xff"', "without a known phase (ph)"),
        (b'"ph": "X"', b'"ph": "B"', "begin and end are separate events (ph B, E)"),
    ],
)
def test_an_invalid_event_loses_only_itself(tmp_path, damage, instead, reason):
    begin, third, end = _around(support.text(complete()), 3)
    assert third.count(damage) == 1
    found = read(tmp_path / "t.json", begin + third.replace(damage, instead) + end)
    assert names(found) == [f"op {index}" for index in range(8) if index != 3]
    assert (found.lost_counts, found.cut_reason) == ({reason: 1}, "")


@pytest.mark.parametrize(
    ("damage", "instead"),
    [
        (b'"of": [{"a": 1}, {"b": 2}]', b'"memory bandwidth (GB/s)": inf, "occupancy": -nan, "other": NaN'),
        (b'"of": [{"a": 1}, {"b": 2}]', b'"stream": "seven", "correlation": 99999999999999999999'),
        (b'"of": [{"a": 1}, {"b": 2}]', b'"not UTF-8": "\xff\xfe"'),
    ],
)
def test_invalid_values_in_unused_arguments_lose_no_event(tmp_path, damage, instead):
    """Invalid values in arguments that the reader does not use lose no event."""
    begin, third, end = _around(support.text(complete()), 3)
    found = read(tmp_path / "t.json", begin + third.replace(damage, instead) + end)
    assert names(found) == [f"op {index}" for index in range(8)]
    assert (found.lost_counts, found.cut_reason) == ({}, "")


def _around(content: bytes, index: int) -> tuple[bytes, bytes, bytes]:
    """Splits the text of a trace into the text before an event, the event, and the text after it. index: the number of the
    event."""
    start, end = _bounds(content, f"op {index}")
    return content[:start], content[start:end], content[end:]


def test_one_bad_event_in_many_blocks_is_one_event_lost(tmp_path):
    events = complete(20_000)
    content = support.text(events).replace(b'"op 9999"', b'"op "9999"')
    assert len(content) > 8 * (1 << 18)
    found = read(tmp_path / "t.json", content)
    assert len(found.name) == 19_999
    assert (found.lost_counts, found.cut_reason) == ({"not readable": 1}, "")


@settings(max_examples=150)
@given(at=st.integers(0, 10_000), junk=st.sampled_from([b"\x00", b'"']), length=st.integers(1, 400), pretty=st.booleans())
def test_overwritten_bytes_cost_only_the_events_that_they_touch(tmp_path_factory, at, junk, length, pretty):
    """Overwrites some bytes of a trace by bytes that are invalid JSON at this position. Damage that is valid JSON again cannot
    be detected."""
    junk *= length
    events = complete(12)
    content = support.text(events, pretty=pretty)
    first = content.index(b'"traceEvents"') + 20
    at = first + at % (len(content) - first)
    damaged = content[:at] + junk + content[at + len(junk) :]
    found = read(tmp_path_factory.mktemp("traces") / "t.json", damaged)
    clear = [event["name"] for event in events if not _touched(content, event["name"], at, at + len(junk))]
    assert set(clear) <= set(names(found))
    missing = len(events) - len(set(names(found)) & {event["name"] for event in events})
    said = (
        sum(found.lost_counts.values())
        + bool(found.cut_reason)
        + sum(name not in {e["name"] for e in events} for name in names(found))
    )
    assert not missing or said


def _touched(content: bytes, name: str, begin: int, end: int) -> bool:
    """Returns whether one of the bytes from `begin` to `end` belongs to an event or is within 8 bytes of it."""
    start, last = _bounds(content, name)
    return begin < last + 8 and end > start - 8


def test_threads_of_a_damaged_trace_keep_their_names(tmp_path):
    """A thread in a trace of Kineto is a number or a text such as "stream 7". It must get the same label whether the trace is
    read as a whole or, after damage, event by event."""
    events = [event | {"tid": tid} for event, tid in zip(complete(4), (7, "stream 7", "7b", 8), strict=True)]
    whole = support.text(events)
    for number, content in enumerate((whole, whole.replace(b'"op 2"', b'"op "2"'), whole[: whole.index(b'"op 3"')])):
        found = read(tmp_path / f"{number}.json", content)
        threads = dict(zip(names(found), (found.labels[label] for label in found.thread), strict=True))
        expected = {"op 0": "7", "op 1": "stream 7", "op 2": "7b", "op 3": "8"}
        assert threads == {name: expected[name] for name in threads}
        assert len(threads) == (4 if number == 0 else 3)


def test_a_cut_gzip_stream_gives_what_it_holds(tmp_path):
    content = support.text(complete(4000))
    packed = gzip.compress(content, 6)
    found = read(tmp_path / "t.json.gz", packed[: len(packed) // 2])
    assert 1500 < len(found.name) < 4000
    assert names(found) == [f"op {index}" for index in range(len(found.name))]
    assert found.cut_reason == "its gzip stream ends too early"


def test_a_damaged_gzip_stream_gives_what_comes_before_the_damage(tmp_path):
    packed = bytearray(gzip.compress(support.text(complete(4000)), 6))
    packed[len(packed) // 2] ^= 0xFF
    found = read(tmp_path / "t.json.gz", bytes(packed))
    assert len(found.name) > 1000
    assert "its gzip stream is damaged" in found.cut_reason
    packed = bytearray(gzip.compress(support.text(complete(40)), 6))
    packed[-6] ^= 0xFF  # a byte of the checksum: all events were read, but they may differ from what was written
    found = read(tmp_path / "t.json.gz", bytes(packed))
    assert len(found.name) == 40
    assert "its gzip stream is damaged" in found.cut_reason


def test_gzip_streams_behind_one_another_are_one_trace(tmp_path):
    content = support.text(complete())
    found = read(tmp_path / "t.json.gz", gzip.compress(content[:700]) + gzip.compress(content[700:]))
    assert (len(found.name), found.lost_counts, found.cut_reason) == (8, {}, "")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"traceEvents": ', b"\x00" * 2000, gzip.compress(b"{}", mtime=0), b"\x1f\x8b"]
)
def test_a_file_that_is_no_trace_holds_nothing_and_says_so(tmp_path, content):
    found = read(tmp_path / "t.json", content)
    assert len(found.name) == 0
    assert found.cut_reason
    assert file_figures.describe_damage(found) == [f"cut short: {found.cut_reason}"]


def test_a_bare_list_of_events_is_a_trace_too(tmp_path):
    content = support.text(complete(), pretty=False)
    bare = content[content.index(b"[") : content.rindex(b"]") + 1]
    found = read(tmp_path / "rank-00007.json", bare)
    assert (len(found.name), found.rank, found.lost_counts, found.cut_reason) == (8, 7, {}, "")


def test_lists_behind_the_events_are_not_taken_for_events(tmp_path):
    """A list after `traceEvents` in the file gives no events."""
    content = support.text(complete(), pretty=False)[:-1] + b',"other": [{"x": 1}, {"y": [2]}]}'
    found = read(tmp_path / "t.json", content)
    assert (len(found.name), found.lost_counts, found.cut_reason) == (8, {}, "")


def test_frames_of_the_python_stack_are_skipped(tmp_path):
    events = complete()
    events.insert(3, events[0] | {"cat": "python_function", "name": "train.py(3): step"})
    found = read(tmp_path / "t.json", support.text(events))
    assert (len(found.name), found.lost_counts, found.cut_reason) == (8, {}, "")


def test_a_list_that_begins_with_many_frames_of_the_python_stack_is_a_list_of_events(tmp_path):
    events = complete(1)
    frames = [events[0] | {"cat": "python_function", "name": "train.py(3): step", "args": {}}] * 40_000
    content = support.text([*frames, *events])
    assert content.index(b'"op 0"') > 5 << 20
    found = read(tmp_path / "t.json", content)
    assert (names(found), found.lost_counts, found.cut_reason) == (["op 0"], {}, "")
