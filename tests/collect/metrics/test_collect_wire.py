"""Samples of a counter give bounds for its growth. The bounds can show that fewer bytes were sent than the strategy counts."""

import msgspec
import numpy as np
import pytest
import support_collect as support
from hypothesis import given
from hypothesis import strategies as st

from collect.metrics import network, wire
from collect.sources.device_rows import CounterValues
from shardlab.record_types import ClockOffset
from shardlab.runs.record import NicSample, Result, Sample, StepRecord


def series(seen):
    """A counter from its samples. seen: (time, value, name of the boot) of each sample."""
    times, values, boots = zip(*seen, strict=True)
    return CounterValues(np.array(times, float), np.array(values), np.unique(boots, return_inverse=True)[1])


TENTHS = st.integers(0, 300)  # moments in tenths of a second: as integers, so that equal moments occur


@given(
    sent=st.lists(st.tuples(TENTHS, st.integers(0, 1000))),
    begun=st.lists(TENTHS, min_size=2, max_size=20, unique=True).map(sorted),
    delays=st.lists(st.floats(0, 1), min_size=20, max_size=20),
    edges=st.tuples(TENTHS, TENTHS).map(sorted),
)
def test_the_number_of_sent_bytes_is_within_the_bounds(sent, begun, delays, edges):
    """The true number of bytes is within the bounds.

    The sampler reads the counter some time after a sample began, and before its next sample begins.
    """

    def counter(moment):
        return sum(size for at, size in sent if at <= moment)

    ends = [*begun[1:], begun[-1] + 10]
    seen = [(at, counter(at + delay * (end - at)), "boot") for at, end, delay in zip(begun, ends, delays, strict=False)]
    bounds = network.bound_growth(series(seen), tuple(edges))
    if bounds is None:
        assert edges[0] < begun[1] or edges[1] > begun[-1]
    else:
        assert bounds[0] <= counter(edges[1]) - counter(edges[0]) <= bounds[1]


def test_the_bounds_are_those_of_the_samples_next_to_both_ends():
    seen = [(float(at), 100 * at, "boot") for at in range(20)]
    # At 3.5 s the counter was between its values at 2 s and 4 s, and at 13.5 s between its values at 12 s and 14 s.
    assert network.bound_growth(series(seen), (3.5, 13.5)) == (1200 - 400, 1400 - 200)
    # The host's clock may be 1 s early or late. So at 3.5 s the counter was between its values at 1 s and 5 s, and at 13.5 s
    # between its values at 11 s and 15 s.
    assert network.bound_growth(series(seen), (3.5, 13.5), apart_s=1.0) == (1100 - 500, 1500 - 100)


@pytest.mark.parametrize(
    "seen",
    [
        [(at, 100 * at, "boot") for at in range(3, 20)],
        [(at, 100 * at, "boot") for at in range(13)],
        [(at, 100 * (at % 8), "boot") for at in range(20)],
        [(at, 100 * at, "boot" if at < 8 else "next boot") for at in range(20)],
    ],
    ids=["begins too late", "ends too early", "reset", "another boot"],
)
def test_an_incomplete_or_reset_counter_has_no_bounds(seen):
    """The growth is unknown without a sample before the start and after the end, or if the counter was reset."""
    assert network.bound_growth(series(seen), (3.5, 13.5)) is None


def loaded(period_s, *, sent_per_s=1000.0, nnodes=1, **records):
    """A run of 11 timed steps, one per second, whose collectives send 1000 bytes per step.

    period_s: the time between two telemetry samples. sent_per_s: the bytes per second that the counters of interfaces show.
    """
    what = support.cell("ddp", gpus=2, nnodes=nnodes)
    steps = [StepRecord(schema=1, step=n, t_s=9.0 + n, wall_s=9.0 + n, units=1, step_ms=1000) for n in range(1, 12)]
    moments = [period_s * tick for tick in range(int(30 / period_s))]
    samples = [
        Sample(
            schema=1, t_s=at, wall_s=at, host="h", boot_id="b",
            nics=[
                NicSample(name="lo", kind="loopback", tx_bytes=int(sent_per_s * at)),
                NicSample(name="e", kind="physical", tx_bytes=0),
            ],
        )
        for at in moments
    ]  # fmt: skip
    result = Result(
        schema=1, run_id="r", state="completed", rehearsal=False, steps=11, unit="image", communication_bytes={"wire": 1000.0}
    )
    run = support.loaded(what, step_records={0: steps, 1: steps}, sample_records={"h": samples}, **records)
    return msgspec.structs.replace(run, result=result, backend="gloo")


def test_bytes_are_compared_if_samples_decide():
    assert wire.compute_wire_difference(loaded(0.03125)).value == pytest.approx(0)
    assert wire.compute_wire_difference(loaded(0.03125, sent_per_s=800)).value == pytest.approx(-20)


def test_no_difference_is_reported_if_samples_are_too_far_apart():
    """With a sample every 0.5 s, the bytes of up to 3 s of the 10 s are uncertain, so no difference is reported."""
    assert wire.compute_wire_difference(loaded(0.5)) is None


def test_uncertain_clocks_of_several_hosts_widen_the_bounds():
    """With two hosts, a difference is reported only if their clock offsets are known and small."""
    near = ClockOffset(0.001, 0.0005)
    far = ClockOffset(0.4, 0.0005)
    assert wire.compute_wire_difference(loaded(0.03125, nnodes=2)) is None
    assert wire.compute_wire_difference(
        loaded(0.03125, nnodes=2, clock_offsets={"h": {"start": near, "end": near}})
    ).value == pytest.approx(0)
    assert wire.compute_wire_difference(loaded(0.03125, nnodes=2, clock_offsets={"h": {"start": near, "end": far}})) is None
