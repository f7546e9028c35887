"""The alpha-beta model of the planner against all-reduces over a link of a given rate: a veth pair with a token bucket.

The fastest iteration of each size counts, for the fit and for the measurement: other tests use the processors meanwhile.
"""

import msgspec
import pytest
import support_link
from support_long import LONG, only_long

from jobs.planner import link_fit, step_time
from shardlab.cluster.all_reduce import MeasuredAllReduce
from trainers.theory.term import Term

KIB, MIB = 1 << 10, 1 << 20
# Mbit/s -> iterations. At 10,000 Mbit/s the processors of a busy machine are slower than the link.
RATES = {100: 5, 1_000: 25, **dict(only_long((10_000, 50)))}
FITTED = (4 * KIB, 256 * KIB, (16 if LONG else 4) * MIB)  # in the long form the sizes that `provision` measures
PREDICTED = (4 * MIB, 8 * MIB) if LONG else (MIB, 2 * MIB)  # the bucket of 256 KiB makes small tensors faster than the rate
APART = 3  # predictions that differ by this factor must have the order of the measurements

WHY = support_link.why_not()
pytestmark = pytest.mark.skipif(WHY is not None, reason=WHY or "")


@pytest.fixture(scope="module")
def points():
    """Maps (rate, size) to (predicted, measured seconds) of an all-reduce. The link was fitted to the sizes FITTED only."""
    with support_link.two_machines() as machines:
        found = [
            [{**one, "seconds": one["fastest_s"]} for one in of_rate]
            for of_rate in machines.times(RATES, (*FITTED, *PREDICTED))
        ]
    seconds = {}
    for mbps, figures in zip(RATES, found, strict=True):
        known = {"nodes": ["a", "b"], "ranks": 2, "backend": "gloo", "gpu": None, "measured": "2026-11-24T12:00:00+00:00"}
        fitted = msgspec.convert({**known, "times": figures[: len(FITTED)]}, MeasuredAllReduce)
        over = link_fit.fit_link("network", [fitted])
        for one in figures[len(FITTED) :]:
            exchange = Term("", "all_reduce", one["bytes"], 2)
            seconds[mbps, one["bytes"]] = (step_time.predict_exchange_time(exchange, over).likely, one["seconds"])
    return seconds


def test_the_predicted_order_of_rates_and_sizes_is_the_measured_order(points):
    pairs = [(one, other) for one in points for other in points if points[one][0] > APART * points[other][0]]
    assert {(one, other) for one in RATES for other in RATES if one < other} <= {(one, other) for (one, _), (other, _) in pairs}
    assert all(points[one][1] > points[other][1] for one, other in pairs), points


def test_the_fitted_bandwidth_is_at_most_that_of_the_link_and_the_time_follows(points):
    """1 MiB at 100 Mbit/s takes 84 ms on the wire, without the headers. The bucket lets 256 KiB through at once."""
    for (mbps, size), (predicted, _) in points.items():
        assert predicted > (size - 256 * KIB) * 8 / (mbps * 1e6)


@pytest.mark.skipif(not LONG, reason="only in the long form")
def test_predicted_times_are_within_a_quarter_of_the_measured_ones(points):
    errors = {place: predicted / measured - 1 for place, (predicted, measured) in points.items()}
    assert all(abs(error) <= 0.25 for error in errors.values()), errors
