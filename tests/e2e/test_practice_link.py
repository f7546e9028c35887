"""All-reduces between practice nodes: the bytes that they send on the wire, and their times against the planner's alpha-beta
model, for which `provision verify` measures the network."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from support_e2e import HANG_S
from support_link import RANK, SHAPE
from support_long import only_in_long_form
from support_practice import WHY

from jobs.planner import link_fit, step_time
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace
from trainers.theory.term import Term

MIB = 1 << 20
RATES = (100, 1_000, 10_000)  # Mbit/s
SIZES = (4 * MIB, 8 * MIB)  # `provision` measures 16 MiB
PORT = 29613
TOLERANCE = 0.06  # 3 % for the payload and 3 % for headers, as for the metric wire_difference_pct
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(WHY is not None, reason=WHY or "")]


def limit(practice, mbps):
    """Give the network interface of each node the token bucket that `lan.mbps` configures when the node is made."""
    for name in practice.nodes:
        practice.run(name, f"tc qdisc replace dev host0 {SHAPE.format(mbps=mbps)}")


def seconds(practice, sizes=SIZES, iterations=5):
    """The median seconds of an all-reduce of all nodes, by size. iterations: the number of all-reduces of each size, without
    the warm-up."""
    nodes = list(practice.nodes.values())
    asked = json.dumps([[None, sizes, iterations]])

    def rank(place):
        words = [nodes[place].python, "-c", RANK, str(place), str(len(nodes)), f"{nodes[0].address}:{PORT}", asked]
        return nodes[place].run(words, timeout_s=HANG_S, env={"GLOO_SOCKET_IFNAME": "host0", "OMP_NUM_THREADS": "1"})

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(rank, range(len(nodes))))
    assert [answer.code for answer in answers] == [0] * len(nodes), [answer.stderr for answer in answers]
    (found,) = json.loads(answers[0].stdout.splitlines()[-1])
    return {one["bytes"]: one["seconds"] for one in found}


def sent_bytes(practice):
    """The bytes that the interfaces of all nodes have sent, counted by the kernel of each node."""
    return sum(int(practice.run(name, "cat /sys/class/net/host0/statistics/tx_bytes")) for name in practice.nodes)


def test_an_all_reduce_sends_on_the_wire_the_bytes_of_theory(practice):
    """The bytes of 4 and of 12 iterations differ by 8 all-reduces only, because both send the same at start and warm-up.

    In a ring of n ranks, each rank sends 2 (n - 1) / n of the payload (Patarasuk and Yuan, 2009).
    """
    size, ranks, counts = 16 * MIB, len(practice.nodes), []
    for iterations in (4, 12):
        before = sent_bytes(practice)
        seconds(practice, [size], iterations)
        counts.append(sent_bytes(practice) - before)
    assert (counts[1] - counts[0]) / 8 == pytest.approx(2 * (ranks - 1) * size, rel=TOLERANCE)


@only_in_long_form
def test_times_at_three_rates_are_predicted_in_order_and_within_a_quarter(practice):
    points = {}
    try:
        for mbps in RATES:
            limit(practice, mbps)
            assert practice.provision("verify")["verified"]
            known = inventory.read_all_reduces(Workspace(practice.folder), practice.cluster.name)
            (between,) = (one for one in known if len(one.nodes) == len(practice.nodes))
            over = link_fit.fit_link("network", [between])
            for size, measured_s in seconds(practice).items():
                exchange = Term("an all-reduce", "all_reduce", size, len(practice.nodes))
                points[mbps, size] = (step_time.predict_exchange_time(exchange, over).likely, measured_s)
    finally:
        limit(practice, practice.cluster.lan.mbps)
    told = "\n".join(f"{place}: predicted {one[0]:.4f} s, measured {one[1]:.4f} s" for place, one in points.items())
    for size in SIZES:
        for at in (0, 1):  # predicted, measured
            assert sorted(RATES, key=lambda mbps: points[mbps, size][at]) == sorted(RATES, reverse=True), told
    assert all(abs(predicted / measured_s - 1) <= 0.25 for predicted, measured_s in points.values()), told
