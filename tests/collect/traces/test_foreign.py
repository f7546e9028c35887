"""Traces of other versions of PyTorch and of other devices: shardlab computes figures for a trace, or gives the reason why the
trace has none. One bad file does not affect the others."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import support_hta
import support_trace_shapes as shapes
import support_traces as support

from collect.cli import main
from collect.traces import hta, trace
from collect.traces.breakdown import compute_breakdown
from collect.traces.operators import compare_trace_operators

HTA = os.environ.get("SHARDLAB_HTA")
GPU = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"}


def read(path: Path, content: bytes) -> trace.Trace:
    path.write_bytes(content)
    return trace.read_trace(path)


def run(capsys, *words: str) -> tuple[int, dict, str]:
    """Runs `collect trace` and returns (exit code, JSON document, text on standard error)."""
    code = main(["trace", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), " ".join(err.split())


def truth(events: list[dict]) -> dict[str, int]:
    """Computes the expected figures of the GPU events without the code under test, from the start and end of each event in
    ns."""
    spans = []
    for event in events:
        if event["cat"] in GPU:
            kind = "communication" if "nccl" in event["name"] else "memory" if "Mem" in event["name"] else "compute"
            begin = round(event["ts"] * 1000)
            spans.append((kind, begin, begin + round(event["dur"] * 1000)))
    return support.sweep(spans)


def figures(found: trace.Trace, names: dict) -> dict[str, int]:
    told = compute_breakdown(found)
    return {name: getattr(told, name) for name in names}


def test_categories_of_old_kineto_are_those_of_today(tmp_path):
    events = shapes.old_kineto()
    found = read(tmp_path / "t.json", shapes.text(events))
    expected = truth(events)
    assert figures(found, expected) == expected
    assert {one.name for one in compute_breakdown(found).kernels} == {event["name"] for event in events if event["cat"] in GPU}
    assert found.has_category("cpu_op").sum() == sum(event["cat"] == "Operator" for event in events)


def test_an_accelerator_of_unknown_categories_is_reported_without_figures(tmp_path, capsys):
    events = shapes.mtia()
    (tmp_path / "rank-0.json").write_bytes(shapes.text(events))
    code, document, remarks = run(capsys, f"{tmp_path}/")
    count = sum(event["cat"] == "mtia_ccp_events" for event in events)
    assert (code, document["ranks"]) == (1, [])
    assert f"mtia_ccp_events ({count} events)" in document["without_figures"][0]
    assert f"mtia_ccp_events ({count} events)" in remarks


def test_kernels_launched_before_the_recording_are_left_out_and_counted(tmp_path, capsys):
    """Rank 0 has three more kernels than rank 1. They were launched before the recording began, so they are not part of its
    figures."""
    with_, without = shapes.rccl(before=3), shapes.rccl(before=0)
    recorded = [event for event in with_ if event["args"].get("correlation", 99) > 20]
    found = read(tmp_path / "rank-0.json", shapes.text(with_))
    expected = truth(recorded)
    assert figures(found, expected) == expected
    told = compute_breakdown(found)
    assert (told.before_recording.count, told.before_recording.total_ns) == (3, 46_500)
    everything = sum(round(event["dur"] * 1000) for event in with_ if event["cat"] == "kernel")
    assert told.before_recording.share_pct == pytest.approx(100 * 46_500 / everything)
    assert told.outside_steps is None
    code, document, remarks = run(capsys, f"{tmp_path}/")
    assert (code, document["ranks"][0]["before_recording"]["count"]) == (0, 3)
    assert "rank 0: 3 events of the GPU" in remarks
    assert "launched before the recording began" in remarks
    other = read(tmp_path / "rank-1.json", shapes.text(without))
    assert compute_breakdown(other).before_recording is None
    assert {one.change for one in compare_trace_operators([found], [other])} == {"same"}


def test_figures_of_steps_come_from_what_was_launched_in_a_step(tmp_path):
    events = shapes.rccl(before=0)
    (last,) = [event for event in events if event["name"] == "ProfilerStep#1"]
    within = {event["args"]["correlation"] for event in events if event["cat"] == "cuda_runtime" and event["ts"] < last["ts"]}
    expected = truth([event for event in events if event["args"].get("correlation") in within])
    events.remove(last)
    found = read(tmp_path / "t.json", shapes.text(events))
    assert figures(found, expected) == expected
    assert compute_breakdown(found).outside_steps.count == 8


@pytest.mark.parametrize("change", ["a launch in the middle is lost", "no launches at all"])
def test_a_kernel_whose_launch_is_not_known_counts(tmp_path, change):
    events = shapes.rccl(before=0)
    launches = [event for event in events if event["cat"] == "cuda_runtime"]
    for event in launches if change == "no launches at all" else launches[4:5]:
        events.remove(event)
    expected = truth(events)
    found = read(tmp_path / "t.json", shapes.text(events))
    assert figures(found, expected) == expected
    assert compute_breakdown(found).before_recording is compute_breakdown(found).outside_steps is None


def test_operators_with_a_stream_are_kernels_like_hta_and_not_in_exact_figures(tmp_path):
    """The result agrees with HolisticTraceAnalysis (HTA) 0.5. The next test runs HTA itself."""
    events = shapes.triton()
    found = read(tmp_path / "t.json", shapes.text(events))
    expected = truth(events)
    assert figures(found, expected) == expected
    (rounded,) = hta.compute_hta_breakdowns([found])
    first = [event for event in events if event["ts"] < next(e["ts"] for e in events if e["name"] == "ProfilerStep#1")]
    counted = {event["name"] for event in first if event["args"].get("stream") == 7}
    assert sum(one.count for one in rounded.kernels) == 2 * len(counted)
    text = read(tmp_path / "t.json", shapes.text(shapes.triton(stream="7")))
    assert hta.compute_hta_breakdowns([text]) == [rounded]


@pytest.mark.skipif(not HTA, reason="no Python with HolisticTraceAnalysis is named in SHARDLAB_HTA")
@pytest.mark.parametrize("shape", ["old Kineto", "RCCL", "MTIA", "Triton", "Triton, stream as text", "Triton, one step"])
def test_hta_gives_the_same_for_every_shape(tmp_path, shape):
    changed = {"Triton, stream as text": {"stream": "7"}, "Triton, one step": {"steps": 1}}.get(shape, {})
    # 40 kernels, because pandas uses narrower types for few events, and HTA then fails.
    events = shapes.SHAPES[shape.split(",")[0]](kernels=40, **changed)
    path = tmp_path / "rank-00000.json"
    traces = [read(path, shapes.text(events))]
    ((ours,), (bounds,)) = hta.compute_hta_breakdowns(traces), support_hta.bounds_of(traces)
    done = subprocess.run(
        [HTA, Path(__file__).parents[3] / "tools" / "record_hta.py", tmp_path], capture_output=True, text=True, check=True
    )
    theirs = json.loads(done.stdout, parse_constant=lambda _: None)[0]["ranks"]["0"]
    for name in ("span", "compute", "non_compute", "idle"):
        low, high = getattr(bounds, f"{name}_ns")
        assert low <= 1000 * theirs[f"{name}_us"] <= high
    assert {one.name: one.total_ns // 1000 for one in ours.kernels} == theirs["kernels_us"]


def test_times_that_rounding_makes_negative_are_no_figures(tmp_path, capsys):
    """HTA rounds times to whole microseconds. After that, each of two copies that take less than 1 us lasts -1 us. HTA itself
    stops with an assertion for such a trace; `--like-hta` refuses to give figures."""
    spans = [("mul", 10.0, 20.0), ("Memcpy DtoD", 40.25, 0.5), ("Memcpy DtoD", 50.25, 0.5)]
    kernel = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "args": {"stream": 7, "correlation": 1}}
    events = [kernel | {"name": name, "ts": ts, "dur": dur} for name, ts, dur in spans]
    (tmp_path / "rank-0.json").write_bytes(shapes.text(events, 0))
    assert main(["trace", f"{tmp_path}/", "--like-hta"]) == 2
    assert "non-compute -2 us" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "rank-1.json").write_bytes(shapes.text(shapes.rccl(steps=1), 1))
    code, document, remarks = run(capsys, f"{tmp_path}/", "--like-hta")
    assert (code, [one["rank"] for one in document["ranks"]]) == (1, [1])
    assert "rank-0.json: after HolisticTraceAnalysis' rounding these times are negative" in remarks


def test_ranks_are_in_numeric_order_and_files_of_one_rank_are_reported(tmp_path, capsys):
    for name, rank in (("a10", 10), ("b", 2), ("c", 1), ("d", None), ("e", 2)):
        (tmp_path / f"{name}.json").write_bytes(shapes.text(shapes.rccl(), rank))
    code, document, remarks = run(capsys, f"{tmp_path}/")
    assert (code, [one["rank"] for one in document["ranks"]]) == (0, [1, 2, 2, 10, None])
    assert "rank 2: 2 files are of this rank: b.json, e.json" in remarks


@pytest.mark.parametrize("times", ["numbers", "texts"])
@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_an_event_of_a_rare_form_does_not_change_how_other_events_are_read(tmp_path, shape, times):
    """The reader decodes a block by other types if the block has an event that Kineto does not write. The result is the same.

    times: whether floating-point numbers determine the times, or only texts do, because the times are large.
    """
    since = 0 if times == "numbers" else 100_000_000_000_000.125
    events = [event | {"ts": event["ts"] + since} for event in shapes.SHAPES[shape]()]
    flow = {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 1, "tid": 1, "ts": 5, "args": {}}
    whole = read(tmp_path / "t.json", shapes.text([*events, flow]))
    assert (len(whole.name), whole.lost_counts) == (sum(event["ph"] == "X" for event in events) - len(frames(events)), {})
    for rare in ({"ph": "N", "name": "o"}, {"ph": "I", "name": "o", "ts": 5}, flow | {"ts": "5"}, flow | {"name": 5}):
        found = read(tmp_path / "t.json", shapes.text([*events, rare]))
        assert columns(found) == columns(whole)


def frames(events: list[dict]) -> list[dict]:
    """The frames of the Python stack among events."""
    return [event for event in events if event["cat"] == "python_function"]


def columns(found: trace.Trace) -> str:
    """Everything that a trace contains, as a text that can be compared."""
    with np.printoptions(threshold=sys.maxsize):
        return repr(found)


def test_a_rank_number_behind_the_events_is_read(tmp_path):
    info = ', "distributedInfo": {"rank": 5, "pg_config": [{"ranks": [0, 1]}, {"ranks": [2]}]}, "baseTimeNanoseconds": 77}'
    found = read(tmp_path / "t.json", (json.dumps({"traceEvents": shapes.rccl()})[:-1] + info).encode())
    assert (found.rank, found.base_ns, found.lost_counts, found.cut_reason) == (5, 77, {}, "")


NESTED = b"[" * 5000 + b"]" * 5000
HOSTILE = {
    "an array nested deeply": (b'"device": 2', b'"device": ' + NESTED),
    "an object nested deeply": (b'"device": 2', b'"device": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "half a surrogate pair": (b'"Cijk_Ailk_Bljk"', b'"Cijk\\ud800"'),
    "a correlation beyond 64 bits": (b'"correlation": 103', b'"correlation": 18446744073709551617'),
    "a stream of many digits": (b'"stream": 4', b'"stream": ' + b"9" * 5000),
    "a stream that is a list": (b'"stream": 4', b'"stream": [4]'),
    "a thread of many digits": (b'"tid": 4', b'"tid": ' + b"9" * 30),
    "a huge exponent": (b'"dur": ', b'"dur": 1e999999999, "was": '),
    "a huge exponent of the start": (b'"ts": ', b'"ts": -1E+99999999999999999999, "was": '),
    "a rank beyond any": (b'"rank": 0', b'"rank": ' + b"9" * 400),
    "a deeply nested head": (b'"rank": 0', b'"more": ' + NESTED),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("like_hta", [False, True], ids=["exact", "like HTA"])
def test_no_content_of_a_file_raises_and_the_other_files_are_read(tmp_path, capsys, name, like_hta):
    whole = shapes.text(shapes.rccl(), 0)
    old, new = HOSTILE[name]
    assert old in whole
    (tmp_path / "rank-0.json").write_bytes(whole.replace(old, new, 1))
    (tmp_path / "rank-1.json").write_bytes(shapes.text(shapes.rccl(), 1))
    words = ["--like-hta"] if like_hta else []
    _, document, _ = run(capsys, f"{tmp_path}/", *words)
    assert 1 in [one["rank"] for one in document["ranks"]]
    assert "\ud800" not in json.dumps(document, ensure_ascii=False)


def test_names_of_an_event_read_alone_equal_those_of_the_complete_trace(tmp_path):
    """The names contain escapes, UTF-8 and surrogate pairs. One event is not valid JSON, so the reader reads the events one by
    one, and must find the same names."""
    names = ["\u00e9 plain", "\u4e2d", "\U0001f600"]
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "tid": 1, "ts": 1 + index, "dur": 1} for index, name in enumerate(names)
    ]
    for ascii_ in (True, False):
        listed = ", ".join(json.dumps(event, ensure_ascii=ascii_) for event in events)
        for damage in ("", ', {"ph": "X" "name"}'):
            found = read(tmp_path / "t.json", f'{{"traceEvents": [{listed}{damage}]}}'.encode())
            assert [found.labels[label] for label in found.name] == names


def test_sums_of_durations_go_beyond_64_bits(tmp_path):
    event = {"ph": "X", "cat": "kernel", "name": "mul", "tid": 7, "ts": 0, "dur": 2.2e15, "args": {"stream": 7}}
    (one,) = compute_breakdown(read(tmp_path / "t.json", shapes.text([event] * 9))).kernels
    assert one.total_ns == 9 * 2_200_000_000_000_000_000


@pytest.mark.parametrize("behind", [b"garbage", b"\x1f\x8bgarbage", b"\x00\x00x"])
def test_bytes_behind_a_gzip_stream_are_damage(tmp_path, behind):
    packed = gzip.compress(shapes.text(shapes.rccl()))
    assert "its gzip stream" in read(tmp_path / "t.json.gz", packed + behind).cut_reason
    assert read(tmp_path / "t.json.gz", packed + b"\x00" * 512).cut_reason == ""


def test_a_check_sum_in_a_block_of_its_own_is_looked_at(tmp_path, monkeypatch):
    packed = bytearray(gzip.compress(shapes.text(shapes.rccl())))
    packed[-6] ^= 0xFF
    monkeypatch.setattr("collect.traces.salvage.BLOCK_BYTES", len(packed) - 8)
    assert "its gzip stream is damaged" in read(tmp_path / "t.json.gz", bytes(packed)).cut_reason


class Looked:
    """Wraps the search for the list of events, or the reader of single events, and counts the bytes that it examines."""

    def __init__(self, of) -> None:
        self.of, self.bytes = of, 0

    def search(self, text: bytes, begin: int = 0):
        self.bytes += len(text) - begin
        return self.of.search(text, begin)

    def __call__(self, text: bytes, *, final: bool):
        self.bytes += len(text)
        return self.of(text, final=final)


@pytest.mark.parametrize("row", [b'{"name": 7, "at": [1, 2.5], "tags": {"a": "b"}}', b'[1, "aten::mm", 2.5]'])
@pytest.mark.parametrize("shape", [b'{"rows": [%b]}', b"[%b]"], ids=["an object", "a list"])
def test_json_that_is_no_trace_is_read_once_and_refused(tmp_path, monkeypatch, shape, row):
    """The file has 12 MB and no list of events. If the reader searched the same text again for each block that it reads, this
    would take a hundred times as long."""
    content = shape % b", ".join([row] * (12_000_000 // len(row)))
    list_, single = Looked(trace._EVENT_LIST_START), Looked(trace.salvage_events)
    monkeypatch.setattr(trace, "_EVENT_LIST_START", list_)
    monkeypatch.setattr(trace, "salvage_events", single)
    found = read(tmp_path / "data.json", content)
    assert len(found.name) == 0
    assert "the file has no list of events" in found.cut_reason
    assert list_.bytes < 1.01 * len(content)
    assert single.bytes < 5_000_000


@pytest.mark.parametrize("place", ["before", "behind"])
def test_long_text_around_the_events_is_not_searched_again_and_again(tmp_path, monkeypatch, place):
    """Text before the list of events is read only up to a limit. Text behind it is read to its end, but is searched once."""
    events, text = b'{"traceEvents": [%b]' % shapes.text(shapes.rccl()).partition(b"[")[2].rpartition(b"]")[0], b" " * 8_000_000
    looked, stacks = Looked(trace._EVENT_LIST_START), Looked(trace._STACK_OPTION)
    monkeypatch.setattr(trace, "_MOST_EVENT_BYTES", 1 << 20)
    monkeypatch.setattr(trace, "_EVENT_LIST_START", looked)
    monkeypatch.setattr(trace, "_STACK_OPTION", stacks)
    found = read(tmp_path / "t.json", text + events if place == "before" else events + text)
    assert ("no list of events in its first 1 MiB" in found.cut_reason) == (place == "before")
    assert (len(found.name) == 0) == (place == "before")
    assert looked.bytes < 2_000_000
    assert stacks.bytes < 2_000_000
