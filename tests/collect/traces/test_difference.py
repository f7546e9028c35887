"""The parts of a step add up exactly to the time of the step, and the parts of the difference between two runs to the
difference. The causes of idle time agree with a count of each nanosecond."""

import pytest
import support_ranks as support
import support_traces
from hypothesis import given, settings
from hypothesis import strategies as st

from collect.traces import trace
from collect.traces.breakdown import compute_breakdown
from collect.traces.difference import compute_step_difference
from collect.traces.idle_causes import IdleCauses
from collect.traces.rank_analysis import analyse_rank
from collect.traces.run_answers import RunAnswers
from collect.traces.step_parts import StepPart, compute_mean_step, divide_rank_time
from collect.traces.stragglers import compute_waits


def idle_by_hand(events: list[dict]) -> dict[str, int]:
    """Returns the idle time of a GPU by cause, counted nanosecond by nanosecond. Every kernel in `events` must have a
    correlation id."""
    kernels = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset") and event["dur"]]
    launched = {
        one["args"]["correlation"]: (one["ts"], one["ts"] + one["dur"]) for one in events if one["cat"] == "cuda_runtime"
    }
    first, last = min(one["ts"] for one in kernels), max(one["ts"] + one["dur"] for one in kernels)
    running = support.moments(kernels)
    queued, launching = set(), set()
    for one in kernels:
        begin, end = launched.get(one["args"]["correlation"], (first, first))
        queued |= set(range(end, one["ts"]))
        launching |= set(range(begin, min(end, one["ts"])))
    found = {"host_ns": 0, "launching_ns": 0, "communication_ns": 0, "other_ns": 0}
    for ns in range(first, last):
        if ns in running:
            continue
        if ns not in queued:
            found["launching_ns" if ns in launching else "host_ns"] += 1
            continue
        end_before = max(one["ts"] + one["dur"] for one in kernels if one["ts"] + one["dur"] <= ns)
        start_after = min(one["ts"] for one in kernels if one["ts"] > ns)
        collectives = [
            one["args"]["stream"] for one in kernels if support.is_collective(one) and one["ts"] + one["dur"] == end_before
        ]
        following = [one["args"]["stream"] for one in kernels if one["ts"] == start_after]
        whole = all(moment in queued for moment in range(end_before, ns))
        handed_over = whole and any(a != b for a in collectives for b in following)
        found["communication_ns" if handed_over else "other_ns"] += 1
    return found


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_idle_causes_are_those_of_each_moment(tmp_path_factory, seed):
    (rank,) = support.run(seed, size=1)
    found = trace.read_trace(rank.write(tmp_path_factory.mktemp("run")))
    told = analyse_rank(found)
    by_hand = idle_by_hand(rank.events)
    assert {name: getattr(told.idle, name) for name in by_hand} == by_hand
    assert told.idle.total_ns == told.idle_ns == compute_breakdown(found).idle_ns


def test_the_causes_of_idle_time_in_an_example(tmp_path):
    rank = support.RankOfRun(0)
    rank.launch("kernel", "gemm", 7, 0, 10, 20)
    rank.launch("kernel", support.NCCL, 20, 5, 30, 40)  # launched at 5: idle from 20 to 30 by "other"
    # This kernel ran after the collective, for which it waited. The cause of the idle time from 40 to 44 is communication.
    rank.launch("kernel", "gemm", 7, 6, 44, 50)
    # The call that launches this kernel lasts from 70 to 73. The cause of the idle time from 50 to 70 is the host, from 70 to
    # 73 it is this call, and from 73 to 75 it is "other".
    rank.launch("kernel", "gemm", 7, 70, 75, 80)
    told = analyse_rank(trace.read_trace(rank.write(tmp_path)))
    assert told.idle == IdleCauses(host_ns=20, launching_ns=3, communication_ns=4, other_ns=12)
    delays = told.launches
    assert (delays.count, delays.total_ns, delays.longest_ns, delays.median_ns) == (4, 7 + 22 + 35 + 2, 35, 7)


def test_launches_that_are_not_recorded_leave_the_cause_open(tmp_path):
    rank = support.RankOfRun(0)
    rank.launch("kernel", "gemm", 7, None, 10, 20)
    rank.launch("kernel", "gemm", 7, None, 30, 40)
    told = analyse_rank(trace.read_trace(rank.write(tmp_path)))
    assert (told.idle, told.launches, told.idle_ns) == (None, None, 10)
    (part,) = [part for part in divide_rank_time(told, 0, compute_waits([told])) if part.kind == "idle"]
    assert part.label == "idle: cause not recorded"


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 100_000), other=st.integers(0, 100_000), size=st.integers(1, 3))
def test_the_parts_sum_exactly(tmp_path_factory, seed, other, size):
    folder = tmp_path_factory.mktemp("run")
    here, there = (
        [analyse_rank(trace.read_trace(rank.write(folder))) for rank in support.run(one, size=many, steps=2 + one % 2)]
        for one, many in ((seed, size), (other, 2))
    )
    for place, told in enumerate(here):
        assert sum(divide_rank_time(told, place, compute_waits(here)).values()) == told.span_ns
    found = compute_step_difference([RunAnswers(here)], [RunAnswers(there)])
    spans = [sum(one.span_ns for one in ranks) // sum(one.steps for one in ranks) for ranks in (here, there)]
    assert found.per == "step"
    assert [found.time_ns, found.against_ns, found.difference_ns] == [*spans, spans[0] - spans[1]]
    assert sum(one.time_ns for one in found.parts) == found.time_ns
    assert sum(one.against_ns for one in found.parts) == found.against_ns
    assert sum(one.difference_ns for one in found.parts) == found.difference_ns
    assert sorted(one.part for one in found.parts) == sorted({one.part for one in found.parts})


@given(
    sums=st.dictionaries(st.sampled_from([StepPart("idle", cause=str(n)) for n in range(6)]), st.integers(0, 10**12)),
    steps=st.integers(1, 1000),
)
def test_a_mean_part_is_less_than_a_nanosecond_off(sums, steps):
    found = compute_mean_step(sums, steps)
    assert sum(found.parts.values()) == found.total_ns == sum(sums.values()) // steps
    assert all(abs(found.parts[part] * steps - ns) < steps for part, ns in sums.items())


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ("compute", "compute"),
        ("transfer", "exposed all_reduce: transfer"),
        ("late", "exposed all_reduce: waiting for slow ranks"),
        ("host", "idle: host"),
    ],
)
def test_the_cause_of_a_slower_run_is_named(tmp_path, change, label):
    """In both runs, two ranks compute and then all-reduce. One part of the step takes 40 ns longer in the first run than in the
    second; shardlab must name this part."""

    def ranks(longer: dict[str, int]) -> list:
        found = []
        for number in range(2):
            rank = support.RankOfRun(number)
            compute = 100 + longer.get("compute", 0)
            late = longer.get("late", 0) if number else 0  # if rank 1 begins its all-reduce late, rank 0 waits for it
            rank.launch("kernel", "gemm", 7, 0, 10, 10 + compute)
            begin = 10 + compute + late
            end = 10 + compute + longer.get("late", 0) + 50 + longer.get("transfer", 0)
            rank.launch("kernel", support.NCCL, 20, 5, begin, end, **support.arguments("allreduce", 8, 2, "[0, 1]"))
            host = 30 + longer.get("host", 0)
            rank.launch("kernel", "gemm", 7, end + host - 1, end + host, end + host + 9)
            rank.annotate("ProfilerStep#1", 0, end + host + 9)
            found.append(rank)
        return [analyse_rank(trace.read_trace(rank.write(tmp_path))) for rank in found]

    found = compute_step_difference([RunAnswers(ranks({change: 40}))], [RunAnswers(ranks({}))])
    assert found.difference_ns == 40
    # Rank 0 waits for 40 ns. Rank 1 is idle for 40 ns while its collective is in the queue. The difference is a mean over both
    # ranks, so each cause counts 20 ns.
    if change == "late":
        assert {one.label: one.difference_ns for one in found.parts if one.difference_ns} == {label: 20, "idle: other": 20}
    else:
        assert {one.label: one.difference_ns for one in found.parts if one.difference_ns} == {label: 40}


def test_a_gpu_and_a_cpu_are_not_compared(tmp_path):
    rank = support_traces.Rank(0)
    told = analyse_rank(trace.read_trace(rank.write(tmp_path)))
    on_cpu = support.RankOfRun(0)
    on_cpu.annotate("aten::mm", 0, 10, cat="cpu_op")
    gpu, cpu, nothing = (RunAnswers(ranks) for ranks in ([told], [analyse_rank(trace.read_trace(on_cpu.write(tmp_path)))], []))
    assert compute_step_difference([gpu], [cpu]) is None
    assert compute_step_difference([gpu], [nothing]) is None
