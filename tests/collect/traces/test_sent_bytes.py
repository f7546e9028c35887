"""Bytes from the sizes in profiler records, against numbers worked out by hand and against the theory of real runs.

The sizes are those of the tensors that gloo got. They share no code with `trainers.communication`, so a wrong factor there, or
a wrong term of a strategy, fails here.
"""

import json

import msgspec
import pytest
import support_collect as support
from support_long import only_long

from collect.loading.loaded_run import LoadedRun
from collect.metrics import traced_bytes
from collect.reading import load
from collect.summary import summarize
from collect.traces import calls, trace
from collect.traces.collective import parse_gloo_span
from collect.traces.rank_analysis import analyse_rank
from collect.traces.run_answers import RunAnswers
from collect.traces.run_traces import RunTraces
from shardlab.files import files
from shardlab.matrix.cell import Instruments, Profile
from shardlab.runs.record import Result, SameWork
from shardlab.workspace.workspace import Workspace
from trainers.theory import term

pytest_plugins = ["support_trainers"]
RANKS = 4
SHAPES = Profile(first_step=2, steps=2, ranks=list(range(RANKS)), shapes=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", *only_long("fsdp1-full-shard", "fsdp2-zero2", "zero1", "zero3")])
def test_traces_of_a_run_have_the_bytes_of_its_theory(bench, strategy):
    run_dir = bench.complete(strategy=strategy, gpus=RANKS, steps=3, instruments=Instruments(profile=SHAPES))
    run = LoadedRun.read(run_dir)
    assert traced_bytes.sum_traced_bytes(run).value > 5e6
    assert traced_bytes.compute_traced_difference(run).value == pytest.approx(0, abs=traced_bytes.TOLERANCE_PCT)


@pytest.mark.parametrize(
    ("collective", "sent"),
    [  # bytes that a rank sends for a message of 1,200 bytes in a ring of 4 ranks: 3 parts of 300 bytes, twice to all-reduce
        ("all_reduce", 1800),
        ("all_gather", 900),
        ("reduce_scatter", 900),
        ("all_to_all", 900),
        ("broadcast", 900),
        ("reduce", 900),
        ("send", 1200),
        ("recv", 0),
        ("barrier", 0),
        ("gather", None),
        ("generic", None),
    ],
)
def test_the_bytes_that_a_rank_sends_follow_from_the_message_size(collective, sent):
    assert calls.compute_sent_bytes(collective, 1200, 4) == sent
    assert calls.compute_sent_bytes(collective, 1200, None) == (0 if collective == "barrier" else None)


@pytest.mark.parametrize("ranks", range(2, 10))
def test_theory_and_traces_count_each_collective_alike(ranks):
    """The trainers' factors (`term.FACTORS`) and those for traces (`compute_sent_bytes`) do not share code."""
    for collective, factor in term.FACTORS.items():
        assert calls.compute_sent_bytes(collective, 840, ranks) == pytest.approx(840 * factor(ranks))


def span(name, at, dims, types=("float",), **more):
    args = {"Input Dims": dims, "Input type": list(types)} if dims is not None else {}
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 0, "tid": 2, "ts": at, "dur": 10, "args": args} | more


def launched(name, at):
    return {"ph": "X", "cat": "cpu_op", "name": f"c10d::{name}", "pid": 0, "tid": 1, "ts": at, "dur": 5, "args": {}}


def analysed(folder, *events, rank=0, groups=(4,), steps=2):
    """The analysis of a trace of gloo. Profiler step n lasts from 1000 n to 1000 n + 900 us. groups: the size of each group."""
    begins = [span(f"ProfilerStep#{n}", 1000 * n, None, dur=900, tid=1) for n in range(1, steps + 1)]
    listed = [{"pg_name": str(n), "pg_desc": "", "pg_size": size, "ranks": []} for n, size in enumerate(groups)]
    head = {"distributedInfo": {"backend": "gloo", "rank": rank, "pg_config": listed}}
    path = folder / f"rank-{rank:05d}.json"
    path.write_text(json.dumps(head | {"traceEvents": [*begins, *events]}))
    found = trace.read_trace(path)
    assert (found.lost_counts, found.cut_reason) == ({}, "")
    return analyse_rank(found)


def test_bytes_of_a_step_are_the_mean_over_steps_and_the_sum_over_ranks(tmp_path):
    events = [
        launched("allreduce_", 1100),
        span("gloo:all_reduce", 1110, [[100], [2, 25]], ["float"] * 2),  # sends 3/2 of 600 bytes
        launched("_allgather_base_", 2100), span("gloo:all_gather", 2110, [[100]], ["c10::BFloat16"]),  # 3/4 of 800
        launched("broadcast_", 1960), span("gloo:broadcast", 1965, [[1000]]),  # between the steps: not counted
    ]  # fmt: skip
    one = analysed(tmp_path, *events, rank=0)
    assert traced_bytes.sum_bytes_sent_in_step([one]) == (900 + 600) / 2
    assert traced_bytes.sum_bytes_sent_in_step([one, analysed(tmp_path, *events[:2], rank=1)]) == (900 + 600) / 2 + 900 / 2
    uses = {use["collective"]: use["sent_bytes"] for use in RunAnswers([one]).make_document()["collectives"]}
    assert uses == {"all_reduce": 900, "all_gather": 600, "broadcast": 3000}


def test_a_reduce_scatter_that_gloo_executes_as_all_reduce_counts_as_requested(tmp_path):
    """gloo executes a reduce_scatter as an all_reduce. The operator that launched it shows what the program called."""
    launches = [launched("_reduce_scatter_base_", 1100), launched("allreduce_", 1200)]
    spans = [span("gloo:all_reduce", 1110, [[100]]), span("gloo:all_reduce", 1210, [[100]])]
    assert traced_bytes.sum_bytes_sent_in_step([analysed(tmp_path, *launches, *spans, steps=1)]) == 300 + 600
    # One of two launches has no span. Which launch the other span belongs to is unknown, and so are the bytes.
    assert traced_bytes.sum_bytes_sent_in_step([analysed(tmp_path, *launches, *spans[1:], steps=1)]) is None


@pytest.mark.parametrize(
    ("event", "groups"),
    [
        (span("gloo:all_reduce", 1110, None), (4,)),  # the profiler did not record shapes
        (span("gloo:all_reduce", 1110, [[100]]), (4, 2)),  # the span does not say in which group it ran
        (span("gloo:all_reduce", 1110, [[100]]), ()),
        (span("gloo:gather", 1110, [[100]]), (4,)),
    ],
)
def test_unknown_sizes_give_no_bytes(tmp_path, event, groups):
    assert traced_bytes.sum_bytes_sent_in_step([analysed(tmp_path, event, groups=groups)]) is None


def test_groups_of_one_size_need_not_be_distinguished(tmp_path):
    found = analysed(tmp_path, span("gloo:all_reduce", 1110, [[100]]), groups=(4, 4), steps=1)
    assert traced_bytes.sum_bytes_sent_in_step([found]) == 600


@pytest.mark.parametrize(
    ("dimensions", "types"),
    [
        (b"", b'["float"]'),
        (b"[[100]]", b""),
        (b"[[-1]]", b'["float"]'),
        (b"[[1.5]]", b'["float"]'),
        (b'[["100"]]', b'["float"]'),
        (b"[[4000000000, 4000000000, 4000000000]]", b'["float"]'),
        (b"[[100], [100]]", b'["float", "double"]'),
        (b"[[100]]", b'["a type of tomorrow"]'),
        (b"[[[100]]]", b'["TensorList"]'),
        (b"[]", b"[]"),
        (b"[[100]]", b'["float", "float"]'),
    ],
)
def test_inputs_that_are_not_tensors_of_one_known_type_have_no_size(dimensions, types):
    assert parse_gloo_span("gloo:all_reduce", dimensions, types) is None
    assert parse_gloo_span("gloo:all_reduce", b"[[100], []]", b'["float", "float"]').input_bytes == 404  # [] is a scalar


def compared(folder, theory, ranks=(0, 1), verdict="proven"):
    """The metrics of a run of two ranks. Each profiled rank sends 400 bytes in its step."""
    events = [launched("allreduce_", 1100), span("gloo:all_reduce", 1110, [[100]])]
    analyses = [analysed(folder, *events, rank=rank, groups=(2,), steps=1) for rank in ranks]
    result = Result(
        schema=1, run_id="r", state="completed", rehearsal=False, steps=3, unit="image",
        same_work=SameWork(verdict=verdict, why=""), communication_bytes={"theory": theory},
    )  # fmt: skip
    run = msgspec.structs.replace(support.loaded(support.cell("ddp", gpus=2)), result=result)
    run.__dict__["traces"] = RunTraces(analyses=analyses)
    return traced_bytes.sum_traced_bytes(run), traced_bytes.compute_traced_difference(run)


def test_the_difference_is_relative_to_the_theory(tmp_path):
    sent, difference = compared(tmp_path, 640.0)
    assert (sent.value, sent.unit, difference.value, difference.unit) == (800, "bytes", pytest.approx(25), "%")
    assert compared(tmp_path, 640.0, ranks=(0,)) == (None, None)  # rank 1 was not profiled
    assert compared(tmp_path, 640.0, verdict="other work")[1] is None
    assert compared(tmp_path, 0.0)[1] is None


@pytest.mark.parametrize(("theory", "said"), [(790.0, None), (640.0, "25.0 % more, tolerance 3 %"), (1000.0, "20.0 % fewer")])
def test_a_theory_that_the_traces_contradict_is_reported(tmp_path, theory, said):
    workspace, cell = Workspace(tmp_path), support.cell("ddp", gpus=2, launcher="fork")
    support.keep(workspace, [cell], repeats=1)
    folder = support.completed(workspace, cell)
    files.write_json(folder.result, msgspec.structs.replace(folder.read_result(), communication_bytes={"theory": theory}))
    (folder.path / "trace").mkdir()
    for rank in (0, 1):
        analysed(
            tmp_path, launched("allreduce_", 1100), span("gloo:all_reduce", 1110, [[100]]), rank=rank, groups=(2,), steps=1
        )
        name = folder.trace_file(rank).name
        (folder.path / "trace" / name).write_bytes((tmp_path / name.removesuffix(".gz")).read_bytes())
    found = summarize(load.load_matrix(workspace, None), "ddp")
    assert found.rows[0].metrics["sent_traced_bytes"].value == 800
    remarks = [remark for remark in found.remarks if remark.startswith("bytes that were measured differ")]
    assert bool(remarks) == (said is not None)
    assert all(said in remark and cell.name() in remark for remark in remarks)
