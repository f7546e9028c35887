"""Times and events of a trace are read exactly, to the nanosecond, however the text is formatted, split into blocks, or
ordered."""

import gzip
import json
import math
import os
import random
import re
import subprocess
import sys
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import support_collect
import support_traces as support
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from collect.metrics import trace as metrics
from collect.traces import intervals, run_traces, trace
from collect.traces.breakdown import EventTally, compute_breakdown
from collect.traces.event import UNKNOWN_NS, convert_numbers_to_ns, convert_texts_to_ns, convert_to_integers
from collect.traces.file_figures import compute_file_figures
from collect.traces.operators import compare_trace_operators

EXACT = ("span_ns", "compute_ns", "communication_ns", "memory_ns", "idle_ns", "non_compute_ns", "overlap_ns")


def read(path, content: bytes) -> trace.Trace:
    path.write_bytes(content)
    return trace.read_trace(path)


def figures(found: trace.Trace) -> dict:
    told = compute_breakdown(found)
    return {name: getattr(told, name) for name in EXACT}


def rows(found: trace.Trace) -> list[tuple]:
    """Returns every event of a trace as a tuple of its columns. The columns that contain numbers of labels contain the labels
    instead."""
    columns = (found.name, found.category, found.thread, found.stream, found.correlation, found.start_ns, found.duration_ns)
    spelled = [[found.labels[i] for i in column] if index < 3 else column.tolist() for index, column in enumerate(columns)]
    return list(zip(*spelled, strict=True))


@pytest.mark.parametrize("start", [support.NEW, support.OLD], ids=["since a base", "since the epoch"])
@pytest.mark.parametrize("gz", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("pretty", [True, False], ids=["as Kineto", "compact"])
def test_the_figures_equal_the_generated_trace_to_the_nanosecond(tmp_path, start, gz, pretty):
    for number in range(3):
        rank = support.Rank(number, seed=1, kernels=60, start=start)
        found = trace.read_trace(rank.write(tmp_path, pretty=pretty, gz=gz))
        assert (found.rank, found.lost_counts, found.cut_reason) == (number, {}, "")
        assert figures(found) == support.truth(rank.events)
        assert len(found.name) == sum(event["ph"] == "X" for event in rank.events)


def test_figures_are_kept_until_the_trace_or_the_code_that_reads_it_changes(tmp_path, monkeypatch):
    path = support.Rank(0, kernels=40).write(tmp_path, gz=True)
    found = trace.read_trace(path)
    told = msgspec.structs.replace(compute_file_figures(found), path=path.name)
    assert run_traces.load_figures(path) == told
    with monkeypatch.context() as patched:
        patched.setattr(trace, "read_trace", None)
        assert run_traces.load_figures(path) == told
    (beside,) = tmp_path.glob(".*")
    whole = beside.read_bytes()
    digest = json.loads(whole)["code"]
    assert re.fullmatch("[0-9a-f]{64}", digest)
    made_by_other_code = whole.replace(digest.encode(), b"other code")
    for damaged in (b"", whole[:-9], b"[]", made_by_other_code):
        beside.write_bytes(damaged)
        assert run_traces.load_figures(path) == told
        assert beside.read_bytes() == whole
    # A truncated gzip file gives no figures, not even the cached figures of the whole file.
    path.write_bytes(path.read_bytes()[:-20])
    assert not run_traces.load_figures(path).is_usable
    assert not run_traces.load_figures(path).is_usable
    support.Rank(0, kernels=10).write(tmp_path, gz=True)
    assert run_traces.load_figures(path).breakdown == compute_breakdown(trace.read_trace(path)) != told.breakdown


def test_kernels_and_collectives_are_counted_by_name(tmp_path):
    rank = support.Rank(0, kernels=40)
    told = compute_breakdown(trace.read_trace(rank.write(tmp_path)))
    kernels = [event for event in rank.events if support.kind(event)]
    by_hand = {
        name: EventTally(name, len(found), sum(found))
        for name in {event["name"] for event in kernels}
        if (found := [event["dur"] for event in kernels if event["name"] == name])
    }
    assert {one.name: one for one in told.kernels} == by_hand
    assert [one.total_ns for one in told.kernels] == sorted((one.total_ns for one in told.kernels), reverse=True)
    wanted = {"all_reduce": by_hand[support.ALL_REDUCE], "all_gather": by_hand[support.ALL_GATHER]}
    assert {one.name: (one.count, one.total_ns) for one in told.collectives} == {
        name: (one.count, one.total_ns) for name, one in wanted.items()
    }
    assert told.steps == 4
    assert told.overlap_pct == 100 * told.overlap_ns / told.communication_ns
    assert told.exposed_communication_ns == told.communication_ns - told.overlap_ns


@pytest.mark.parametrize("pretty", [True, False])
def test_a_block_may_end_at_any_byte(tmp_path, monkeypatch, pretty):
    events = support.Rank(0, steps=1, kernels=2).events
    content = support.text(events, pretty=pretty)
    whole = rows(read(tmp_path / "t.json", content))
    assert len(whole) == sum(event["ph"] == "X" for event in events)
    for at in range(1, len(content)):
        monkeypatch.setattr(trace, "read_blocks", lambda path, at=at: iter((content[:at], content[at:])))
        found = trace.read_trace(tmp_path / "t.json")
        assert (rows(found), found.lost_counts, found.cut_reason) == (whole, {}, ""), at


@settings(max_examples=25)
@given(size=st.integers(1, 700), pretty=st.booleans(), gz=st.booleans())
def test_blocks_of_any_size_and_gzip_change_nothing(tmp_path_factory, size, pretty, gz):
    rank = support.Rank(0, steps=2, kernels=6)
    folder = tmp_path_factory.mktemp("traces")
    content = rank.text(pretty=pretty)
    whole = rows(read(folder / "whole.json", content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collect.traces.salvage.BLOCK_BYTES", size)
        found = read(folder / "t.json", gzip.compress(content) if gz else content)
    assert (rows(found), found.lost_counts, found.cut_reason) == (whole, {}, "")


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_the_order_of_events_means_nothing(tmp_path_factory, seed):
    events = list(support.Rank(0, seed=seed, steps=2).events)
    path = tmp_path_factory.mktemp("traces") / "t.json"
    before = compute_breakdown(read(path, support.text(events)))
    random.Random(seed).shuffle(events)
    assert compute_breakdown(read(path, support.text(events))) == before


@given(st.lists(st.tuples(st.integers(0, 2 * 10**18), st.integers(0, 6)), min_size=1, max_size=20), st.booleans())
def test_times_are_exact_however_many_digits_they_have(times, signed):
    """The times go up to 2e18 ns, like timestamps since 1970. If a text has digits below 1 ns, the time is rounded half to
    even."""
    texts = []
    for ns, digits in times:
        whole, rest = divmod(ns, 1000)
        texts.append(f"{'-' if signed else ''}{whole}" + (f".{rest:03d}{'5' * digits}"[: digits + 1] if digits else ""))
    expected = [round(Fraction(text) * 1000) for text in texts]
    assert convert_texts_to_ns([Raw(text.encode()) for text in texts]).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, (1000 << 43) - 1000), st.integers(0, 3)), min_size=1, max_size=20), st.booleans())
def test_numbers_below_101_days_have_the_times_of_their_texts(times, signed):
    texts = [
        f"{'-' if signed else ''}{ns // 1000}.{ns % 1000:03d}"[: None if digits == 3 else digits - 3] for ns, digits in times
    ]
    numbers = [float(text) for text in texts]
    assert convert_numbers_to_ns(numbers).tolist() == [round(Fraction(text) * 1000) for text in texts]


def test_numbers_that_do_not_determine_the_time_give_no_times():
    """If a floating-point number does not determine a whole number of nanoseconds, the reader must use the text of the time
    instead. For example, 1.0005 us is 1000.5 ns."""
    assert convert_numbers_to_ns([1669783687700739, 22]).tolist() == [1669783687700739000, 22000]
    assert convert_numbers_to_ns([5000000000000, 0.5, -3]).tolist() == [5000000000000000, 500, -3000]
    for numbers in (
        [1669783687700739.25, 2],
        [1.0005],
        [float(1 << 43)],
        [1 << 63],
        [1 << 59],
        [1.5, 10**400],
        [1.5, math.nan],
    ):
        assert convert_numbers_to_ns(numbers) is None, numbers


@pytest.mark.parametrize("base", ["", "5000000000", "1669783687700"])
@pytest.mark.parametrize("digits", range(6))
def test_a_file_has_the_times_of_its_texts(tmp_path, base, digits):
    """The file begins with 2,000 times that numbers determine exactly, and then has times for which the reader needs the
    text."""
    texts = [
        *(f"{index}.125" for index in range(2000)),
        *(f"{base}{index}.{'04995'[:digits]}".rstrip(".") for index in range(9)),
    ]
    event = '{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1,\n "ts": %s, "dur": %s}'
    content = "[" + ", ".join(event % (text, text) for text in texts) + "]"
    found = read(tmp_path / "t.json", content.encode())
    expected = [round(Fraction(text) * 1000) for text in texts]
    assert (found.start_ns.tolist(), found.duration_ns.tolist()) == (expected, expected)


def test_invalid_times_are_unknown():
    texts = [b"12.345", b"", b'"x7.000"', b"null", b"1e3", b"1e400", b"-0.001", b"\xff"]
    expected = [12345, UNKNOWN_NS, UNKNOWN_NS, UNKNOWN_NS, 1_000_000, UNKNOWN_NS, -1, UNKNOWN_NS]
    assert convert_texts_to_ns([Raw(text) for text in texts]).tolist() == expected
    assert convert_texts_to_ns([]).tolist() == convert_numbers_to_ns([]).tolist() == []


def test_numbers_of_events_are_integers_or_minus_one_whatever_the_other_values_are():
    values = [7, True, "8", 9.75, "seven", None, [4], {}, 1 << 63, -(1 << 63), math.nan, 1e300, "9" * 5000]
    expected = [7, 1, 8, 9, -1, -1, -1, -1, -1, -(1 << 63), -1, -1, -1]
    assert convert_to_integers(values).tolist() == expected
    assert [convert_to_integers([value]).tolist() for value in values] == [[one] for one in expected]
    assert convert_to_integers([]).tolist() == []


@pytest.mark.skipif(sys.platform != "linux", reason="the threads of a process are listed in /proc on Linux only")
def test_a_process_that_reads_traces_starts_no_threads_of_openblas():
    """Such threads would take processor time although `collect` computes no linear algebra."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    code = "import os, collect.traces.trace; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


_spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def _union(spans) -> intervals.Intervals:
    return intervals.merge_overlapping(np.array([a for a, _ in spans], np.int64), np.array([b for _, b in spans], np.int64))


def _points(spans) -> set[int]:
    return {point for begin, end in spans for point in range(begin, end)}


@given(_spans, _spans)
def test_operations_on_intervals_equal_those_on_sets_of_points(one, other):
    """Operations on intervals give the same as set operations on all their points."""
    a, b, points, others = _union(one), _union(other), _points(one), _points(other)
    assert a.length == len(points)
    assert intervals.measure_intersection(a, b) == len(points & others)
    assert intervals.unite_intervals(a, b).length == len(points | others)
    assert _points(zip(*(column.tolist() for column in intervals.subtract_intervals(a, b)))) == points - others
    assert intervals.clip_intervals(a, 10, 30).length == len(points & set(range(10, 30)))
    assert np.all(a.end > a.start)
    assert np.all(a.start[1:] > a.end[:-1])


def test_metrics_are_ms_a_step_and_mean_over_ranks(tmp_path):
    ranks = [support.Rank(rank, steps=4) for rank in range(2)]
    told = [compute_breakdown(trace.read_trace(rank.write(tmp_path))) for rank in ranks]
    truths = [support.truth(rank.events) for rank in ranks]
    run = support_collect.loaded(support_collect.cell())
    found = {metric.name: metric.of_run(run.with_breakdowns(told)) for metric in metrics.METRICS}
    for name in ("compute", "communication", "non_compute", "idle"):
        by_hand = sum(truth[f"{name}_ns"] for truth in truths) / 2 / 4 / 1e6
        assert found[f"{name}_ms"].value == pytest.approx(by_hand, rel=1e-12)
        assert (found[f"{name}_ms"].unit, found[f"{name}_ms"].kind) == ("ms", "gpu")
    assert found["memory_operations_ms"].value == pytest.approx(sum(truth["memory_ns"] for truth in truths) / 8e6, rel=1e-12)
    exposed = sum(truth["communication_ns"] - truth["overlap_ns"] for truth in truths) / 8e6
    assert found["exposed_communication_ms"].value == pytest.approx(exposed, rel=1e-12)
    shares = [100 * truth["overlap_ns"] / truth["communication_ns"] for truth in truths]
    assert found["overlap_pct"].value == pytest.approx(sum(shares) / 2, rel=1e-12)
    assert all(metric.of_run(run) is None for metric in metrics.METRICS)


def _op(name: str, at: int, dur: int, cat: str = "cpu_op") -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": at, "dur": dur}


def test_operators_are_new_gone_or_changed_per_step_and_rank(tmp_path):
    def one(steps: int, *events: dict) -> list[trace.Trace]:
        marks = [_op(f"ProfilerStep#{n}", n, 1, "user_annotation") for n in range(steps)]
        return [read(tmp_path / f"rank-{rank}.json", support.text([*marks, *events], rank)) for rank in range(2)]

    run = one(
        2,
        _op("aten::mm", 0, 10),
        _op("aten::mm", 20, 30),
        _op("aten::cat", 50, 8),
        _op("mul", 1, 2, "kernel"),
        _op("mul", 5, 2),
    )
    against = one(1, _op("aten::mm", 0, 50), _op("aten::sum", 60, 5), _op("mul", 1, 3, "kernel"))
    found = {(each.kind, each.name): each for each in compare_trace_operators(run, against)}
    assert {key: each.change for key, each in found.items()} == {
        ("cpu_op", "aten::mm"): "same",
        ("cpu_op", "aten::cat"): "new",
        ("cpu_op", "mul"): "new",
        ("cpu_op", "aten::sum"): "gone",
        ("kernel", "mul"): "changed",
    }
    mm = found["cpu_op", "aten::mm"]
    assert (mm.calls, mm.against_calls, mm.time_ns, mm.against_time_ns, mm.time_difference_ns) == (1, 1, 20, 50, -30)
    assert next(iter(found)) == ("cpu_op", "aten::mm")  # the differences are sorted, the largest first
