"""Collectives are matched over ranks. Waiting time, transfer time, bandwidth and hidden share are those with which the test
built the traces."""

import random

import pytest
import support_ranks as support
import support_traces
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from collect.traces import trace
from collect.traces.rank_analysis import RankAnalysis, analyse_rank
from collect.traces.run_answers import RunAnswers
from collect.traces.stragglers import SYNCHRONIZING_COLLECTIVES, compute_waits


def analyses(folder, ranks, **said) -> list[RankAnalysis]:
    return [analyse_rank(trace.read_trace(rank.write(folder, **said))) for rank in ranks]


def exposed(rank: support.RankOfRun) -> list[set[int]]:
    """Returns, for each collective in the order of their starts, the nanoseconds in which the rank does not compute and no
    earlier collective runs."""
    events = support.kernels(rank)
    taken = support.moments([event for event in events if event["cat"] == "kernel" and not support.is_collective(event)])
    found = []
    for _, _, start, end, *_ in rank.calls:
        found.append(set(range(start, end)) - taken)
        taken |= set(range(start, end))
    return found


def synchronizes(ranks):
    """Whether the ranks called a collective in which all ranks wait for one another."""
    return any(name in SYNCHRONIZING_COLLECTIVES for name, *_ in ranks[0].calls)


def test_ranks_without_a_collective_in_which_all_wait_have_no_waiting_time(tmp_path):
    ranks = next(run for run in map(support.run, range(100_000)) if not synchronizes(run))
    found = compute_waits(analyses(tmp_path, ranks))
    assert (found.ranks, found.missing_reason) == ([], "the ranks called no collective that all of them wait in")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 100_000), size=st.integers(2, 4))
def test_waiting_and_lost_time_equal_those_of_the_generator(tmp_path_factory, seed, size):
    ranks = support.run(seed, size=size)
    assume(synchronizes(ranks))
    found = compute_waits(analyses(tmp_path_factory.mktemp("run"), ranks))
    assert found.unmatched_count == 0
    last = {rank.rank: 0 for rank in ranks}
    caused = {rank.rank: 0 for rank in ranks}
    for together in zip(*(rank.calls for rank in ranks), strict=True):
        first = [place for place, call in enumerate(together) if call[5] == 0]
        if together[0][0] in SYNCHRONIZING_COLLECTIVES and len(first) == 1:
            last[first[0]] += 1
            caused[first[0]] += sum(call[5] for call in together)
    for rank, told in zip(ranks, found.ranks, strict=True):
        matched = [
            (call, ns) for call, ns in zip(rank.calls, exposed(rank), strict=True) if call[0] in SYNCHRONIZING_COLLECTIVES
        ]
        assert told.rank == rank.rank
        assert told.calls == len(matched)
        assert told.waited_ns == sum(call[5] for call, _ in matched)
        assert told.lost_ns == sum(len(ns & set(range(call[2], call[2] + call[5]))) for call, ns in matched)
        assert (told.last, told.caused_ns) == (last[rank.rank], caused[rank.rank])
    assert found.skew_ns == sorted(
        max(call[5] for call in together)
        for together in zip(*(rank.calls for rank in ranks), strict=True)
        if together[0][0] in SYNCHRONIZING_COLLECTIVES
    )


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_the_order_of_the_files_changes_nothing(tmp_path_factory, seed):
    told = analyses(tmp_path_factory.mktemp("run"), support.run(seed))
    before = RunAnswers(told).make_document()
    random.Random(seed).shuffle(told)
    assert RunAnswers(told).make_document() == before


@pytest.mark.parametrize("seed", range(8))
def test_bandwidth_and_hidden_share_are_by_nccl_tests(tmp_path, seed):
    ranks = support.run(seed)
    computing = [
        support.moments([one for one in support.kernels(rank) if one["cat"] == "kernel" and not support.is_collective(one)])
        for rank in ranks
    ]
    factors = {"all_reduce": 4 / 3, "all_gather": 2 / 3, "reduce_scatter": 2 / 3, "broadcast": 1}
    uses = {use.collective: use for use in RunAnswers(analyses(tmp_path, ranks)).collectives}
    assert uses.keys() == {call[0] for call in ranks[0].calls}
    for name, use in uses.items():
        calls = [(call, ns) for rank, ns in zip(ranks, computing, strict=True) for call in rank.calls if call[0] == name]
        assert use.calls == len(calls)
        assert use.message_bytes == sum(call[4] for call, _ in calls)
        assert use.total_ns == sum(call[3] - call[2] for call, _ in calls)
        assert use.hidden_ns == sum(len(set(range(call[2], call[3])) & ns) for call, ns in calls)
        waiting = sum(call[5] for call, _ in calls) if name in SYNCHRONIZING_COLLECTIVES else 0
        assert use.waited_ns == waiting
        assert use.algorithm_gb_per_s == pytest.approx(use.message_bytes / (use.total_ns - waiting))
        assert use.bus_gb_per_s == pytest.approx(use.algorithm_gb_per_s * factors[name])
        assert (use.group.name, use.group.size, use.group.ranks) == ("3", 3, (0, 1, 2))
        assert (use.link, use.link_gb_per_s) == ("NVLink 4", 450)
        assert use.link_pct == pytest.approx(100 * use.bus_gb_per_s / 450)


def test_a_link_is_known_only_within_one_host_of_a_known_gpu(tmp_path):
    ranks = support.run(1)
    for said in ({"gpu": "Abacus 3000"}, {"host": ""}):
        assert {use.link for use in RunAnswers(analyses(tmp_path, ranks, **said)).collectives} == {None}
    elsewhere = [*analyses(tmp_path, ranks[:2]), *analyses(tmp_path, ranks[2:], host="node1")]
    assert {use.link for use in RunAnswers(elsewhere).collectives} == {None}


def test_calls_that_differ_between_ranks_are_not_matched_in_that_step_alone(tmp_path):
    ranks = [support.RankOfRun(rank) for rank in range(2)]
    for rank in ranks:
        for step in range(2):
            rank.annotate(f"ProfilerStep#{step}", 1000 * step, 1000 * step + 999)
        for number in range(2):
            elements = 8 + (rank.rank if number else 0)  # in step 1, the sizes of the all-reduce differ between the ranks
            start = 1000 * number + 100 + 50 * rank.rank
            args = support.arguments("allreduce", elements, 2, "[0, 1]")
            rank.launch("kernel", support.NCCL, 20, start - 20, start, 1000 * number + 300, **args)
    found = compute_waits(analyses(tmp_path, ranks))
    assert [(one.rank, one.calls, one.last, one.waited_ns, one.caused_ns) for one in found.ranks] == [
        (0, 1, 0, 50, 0),
        (1, 1, 1, 0, 50),
    ]
    assert found.straggler.rank == 1
    assert found.unmatched_count == 2


def test_one_rank_and_ranks_that_are_not_told_apart_have_no_waiting(tmp_path):
    ranks = support.run(1)
    told = analyses(tmp_path, ranks)
    assert compute_waits(told[:1]).missing_reason == "only one rank was profiled"
    assert compute_waits([told[0], told[0]]).missing_reason.startswith("the traces do not say which rank")
    answers = RunAnswers(told[:1])
    assert answers.make_document()["stragglers"]["rank"] is None
    assert all(use.transfer_ns is None and use.matched == 0 for use in answers.collectives)


def test_calls_without_arguments_have_no_bytes_and_no_bandwidth(tmp_path):
    ranks = [support_traces.Rank(number, seed=number) for number in range(2)]
    uses = RunAnswers([analyse_rank(trace.read_trace(rank.write(tmp_path))) for rank in ranks]).collectives
    assert uses
    for use in uses:
        assert use.group.label in ("not named", "")
        assert (use.message_bytes, use.algorithm_gb_per_s, use.bus_gb_per_s) == (None, None, None)
        assert 0 <= use.hidden_pct <= 100
