"""A real trace of two gloo ranks, recorded by torch's profiler: the figures agree with their definition, and `collect trace`
reads it."""

import gzip
import json
import os
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import support_collect
import support_traces as support
from support_e2e import HANG_S

from collect.cli import main
from collect.traces import trace
from collect.traces.breakdown import compute_breakdown
from shardlab.workspace.workspace import Workspace

SUPPORT = Path(__file__).parents[2] / "support"
FIGURES = ("span_ns", "compute_ns", "communication_ns", "idle_ns", "non_compute_ns", "overlap_ns")


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("gloo")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", SUPPORT / "support_gloo.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment)
    assert done.returncode == 0, done.stderr
    return sorted(folder.glob("*.json.gz"))


@pytest.fixture
def workspace(tmp_path, traces) -> Workspace:
    made = Workspace(tmp_path)
    support_collect.keep(made, [support_collect.cell()], repeats=1)
    run = support_collect.completed(made, support_collect.cell())
    (run.path / "trace").mkdir()
    for path in traces:
        (run.path / "trace" / path.name).write_bytes(path.read_bytes())
    return made


def by_hand(path: Path) -> dict:
    """Computes the figures of a trace directly from their definition, event by event."""
    loaded = json.loads(gzip.decompress(path.read_bytes()), parse_float=Fraction)
    events = [event for event in loaded["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    main_thread = steps[0]["tid"]

    def span(event: dict) -> tuple[int, int]:
        return int(event["ts"] * 1000), int((event["ts"] + event["dur"]) * 1000)

    operators = [event for event in events if event["cat"] == "cpu_op" and event["tid"] == main_thread]
    launches = [span(event) for event in operators if event["name"].startswith(("c10d::", "_c10d_functional::"))]
    computing = [
        span(event) for event in operators if not event["name"].startswith(("c10d::", "_c10d_functional::", "autograd::engine"))
    ]
    edges = sorted({at for both in (*launches, *computing) for at in both})
    spans = [("communication", *span(event)) for event in events if event["name"].startswith("gloo:")]
    for begin, end in pairwise(edges):
        computes = any(a <= begin and end <= b for a, b in computing)
        if computes and not any(a <= begin and end <= b for a, b in launches):
            spans.append(("compute", begin, end))
    return support.sweep(spans, (min(span(step)[0] for step in steps), max(span(step)[1] for step in steps)))


def test_the_figures_of_gloo_ranks_are_those_of_the_definition(traces):
    for rank, path in enumerate(traces):
        found = trace.read_trace(path)
        assert (found.rank, found.lost_counts, found.cut_reason) == (rank, {}, "")
        told = compute_breakdown(found)
        truth = by_hand(path)
        assert (told.source, told.steps, told.memory_ns) == ("gloo", 2, None)
        assert {name: getattr(told, name) for name in FIGURES} == {name: truth[name] for name in FIGURES}
        assert 0 < told.compute_ns < told.span_ns
        assert told.communication_ns > 0


def test_a_collective_has_the_name_of_the_requested_operation(traces):
    """gloo may execute a reduce_scatter as an all_reduce, and gloo's own span in the trace is then called all_reduce. shardlab
    must report the collective that the program called."""
    for path, point_to_point in zip(traces, ("send", "recv"), strict=True):
        counts = {one.name: one.count for one in compute_breakdown(trace.read_trace(path)).collectives}
        # Each of the two steps has an all-reduce of the gradients, a reduce_scatter and a message. The two broadcasts are those
        # of DDP.
        assert counts == {"all_reduce": 2, "reduce_scatter": 2, "broadcast": 2, point_to_point: 2}


def test_collect_trace_shows_the_breakdown_of_a_run(workspace, capsys):
    (run,) = workspace.list_run_ids()
    assert main(["trace", run, "--json", "--workspace", str(workspace.path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank, path in zip(found["ranks"], sorted((workspace.runs / run / "trace").iterdir()), strict=True):
        told = compute_breakdown(trace.read_trace(path))
        assert (rank["compute_ns"], rank["overlap_pct"]) == (told.compute_ns, told.overlap_pct)
        assert rank["exposed_communication_ns"] == told.exposed_communication_ns
    assert found["damage"] == []
    assert "operators" not in found
    assert main(["trace", run, "--workspace", str(workspace.path)]) == 0
    shown = capsys.readouterr().out
    assert f"{run} (exact)" in shown
    assert "reduce_scatter" in shown


def test_collect_trace_compares_two_runs(workspace, tmp_path, capsys):
    (run,) = workspace.list_run_ids()
    other = tmp_path / "gpu"
    other.mkdir()
    support.Rank(0).write(other)
    assert main(["trace", run, "--against", f"{other}/", "--json", "--workspace", str(workspace.path)]) == 0
    operators = {one["name"]: one for one in json.loads(capsys.readouterr().out)["operators"]}
    assert operators["c10d::allreduce_"]["change"] == "new"
    assert operators["aten::mm"]["change"] == "changed"
    assert operators[support.GEMM]["change"] == "gone"
    assert main(["trace", run, "--against", f"{other}/", "--workspace", str(workspace.path)]) == 0
    assert f"{run} against {other}/, per step and rank: " in capsys.readouterr().out


def test_collect_trace_names_damage_and_exits_with_1(workspace, capsys):
    (run,) = workspace.list_run_ids()
    path = workspace.runs / run / "trace" / "rank-00001.json.gz"
    path.write_bytes(path.read_bytes()[:-500])
    assert main(["trace", run, "--workspace", str(workspace.path)]) == 1
    assert "rank-00001.json.gz: cut short: its gzip stream ends too early" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing"], "unknown run 'nothing'"),
        (["./nothing"], "nothing: no traces. Allowed: a run whose cell has instruments: {profile: ...}"),
        (["RUN", "--like-hta"], "rank-00000.json.gz: no kernels of a GPU"),
        (["RUN", "--against", "nothing"], "unknown run 'nothing'"),
    ],
)
def test_collect_trace_without_usable_traces_exits_with_2(workspace, capsys, arguments, sentence):
    (run,) = workspace.list_run_ids()
    arguments = [run if argument == "RUN" else argument for argument in arguments]
    assert main(["trace", *arguments, "--workspace", str(workspace.path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err
