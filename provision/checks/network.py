"""Checks an all-reduce between all nodes, and that its data is sent only over the network on which the nodes train."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from provision.check import Check, Outcome, each, without
from provision.checks.all_reduce import FORMULA, AllReduceReport, kept, why_not
from provision.cloudlab import experiment_interfaces
from provision.fact import Unanswered, decode
from provision.facts.addresses import ADDRESSES
from provision.operation import Site, Target
from shardlab.cluster.all_reduce import bus_bandwidth
from shardlab.remote.remote import CommandOutput

PORT = 29411
LIMIT_S = 240.0
# The most bytes that a node may send over a wrong interface during the test, as a share of the bytes of the all-reduce.
# Background traffic stays below this share.
STRAY = 0.1
CONTROLLED = 0.02  # the same share for the control network of an experiment, over which `provision` itself only logs in
COUNTERS = "for f in /sys/class/net/*/statistics/tx_bytes; do n=${f#/sys/class/net/}; echo ${n%%/*} $(cat $f); done"
_VIRTUAL = re.compile(r"^(lo|docker|veth|vb-|br-)")


def run(site: Site, target: Target) -> Outcome:
    """Run an all-reduce of all nodes, and compare the counters of sent bytes before and after it. Raises Unanswered."""
    targets = site.standing
    if len(targets) < 2:
        return Outcome(None, f"there is only one node{without(site)}")
    nics = [_interface(target) for target in targets]
    controls = [_control(target) for target in targets]
    before = each(targets, _sent)
    answers = each(targets, lambda rank: _launch(targets, rank, nics[targets.index(rank)]))
    after = each(targets, _sent)
    failed = [(failing, answer) for failing, answer in zip(targets, answers, strict=True) if answer.code != 0]
    if failed:
        first, answer = failed[0]
        why = why_not(answer, LIMIT_S)
        advice = f"can the nodes reach {targets[0].node.address}:{PORT} and each other, or does a firewall block them?"
        return Outcome(
            False, f"an all-reduce of {len(targets)} nodes failed; {first.node.name}: {why}", advice, transcript=answer.stderr
        )
    grown = [_grown(*pair) for pair in zip(before, after, strict=True)]
    outcome = judge(answers[0], nics, grown, without(site), controls)
    return kept(outcome, answers[0], [member.node.name for member in targets], None)


def judge(
    answer: CommandOutput,
    nics: list[str],
    grown: list[dict[str, int]],
    absent: str = "",
    controls: Sequence[tuple[str, str] | None] = (),
) -> Outcome:
    """Returns a passed Outcome if the sums are exact and the data was sent over the right interfaces.

    nics: the interface of each node that should carry the data. grown: for each node, the bytes sent during the test, by
    interface. absent: names the nodes that did not take part, such as `; without gpu1`. controls: for each node, (name of the
    node, name of its interface on the control network of an experiment); None: the node is on no control network.
    """
    try:
        report = decode(answer.stdout, AllReduceReport)
    except ValueError as error:
        return Outcome(
            False, f"the output of the all-reduce cannot be read: {error}", "try again: provision CLUSTER.yaml verify"
        )
    if report.wrong:
        return Outcome(
            False, f"{report.wrong} wrong sums between nodes", "do not train here: check the network cards and memory"
        )
    rate = bus_bandwidth(report.ranks, report.bytes, report.time_s)
    meant = min(moved.get(nic, 0) for nic, moved in zip(nics, grown, strict=True))
    strays = [
        f"{nic} {count / 1e6:.0f} MB"
        for own, moved in zip(nics, grown, strict=True)
        for nic, count in moved.items()
        if nic != own and not _VIRTUAL.match(nic) and count > STRAY * meant
    ]
    theory = 2 * (report.ranks - 1) / report.ranks * report.bytes * report.iterations
    over = ", ".join(sorted(set(nics)))
    if controlled := _controlled(controls, grown, theory):
        says = f"the control network, which is only for logins, carried data of the all-reduce: {', '.join(controlled)}"
        return Outcome(
            False,
            f"{says}; each node sends {theory / 1e6:.0f} MB, over {over}",
            "are the addresses of the nodes in the cluster file those of the experiment network, and does /etc/hosts on each "
            "node list these addresses?",
        )
    if strays or meant < theory * 0.9:
        says = f"{meant / 1e6:.0f} of {theory / 1e6:.0f} MB were sent over {over}; elsewhere: {', '.join(strays) or 'nothing'}"
        return Outcome(
            False, says, "which interface has the nodes' addresses (ip addr), and does /etc/hosts list these addresses?"
        )
    figures = {name: value for name, value in msgspec.to_builtins(report).items() if name != "times"}
    measured = {**figures, "bus_bandwidth_gb_per_s": rate / 1e9, "formula": FORMULA}
    bandwidth = f"bus bandwidth {rate / 1e9 * 8:.2f} Gbit/s ({FORMULA}){absent}"
    says = f"all-reduce of {report.ranks} nodes over {over} is exact; {bandwidth}"
    return Outcome(True, says, measured=measured)


def _controlled(controls: Sequence[tuple[str, str] | None], grown: Sequence[dict[str, int]], theory: float) -> list[str]:
    """A phrase for each node that sent more than background traffic over the control network.

    controls, grown: as for `judge`. theory: the bytes that each node has to send for the all-reduce.
    """
    return [
        f"{name} sent {moved[interface] / 1e6:.0f} MB over {interface}"
        for (name, interface), moved in ((own, moved) for own, moved in zip(controls, grown) if own is not None)
        if moved.get(interface, 0) > CONTROLLED * theory
    ]


def _control(target: Target) -> tuple[str, str] | None:
    found = experiment_interfaces.of(target)
    return (target.node.name, found.control.interface) if found is not None and found.control.interface is not None else None


def _launch(targets: list[Target], target: Target, nic: str) -> CommandOutput:
    python = target.node.python
    place, first = targets.index(target), targets[0].node.address
    ranks = [python, "-m", "provision.checks._all_reduce_ranks", "gloo", str(len(targets)), str(place), f"{first}:{PORT}"]
    return target.node.run(ranks, timeout_s=LIMIT_S, env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": nic})


def _interface(target: Target) -> str:
    interface = experiment_interfaces.with_address(target.facts[ADDRESSES], target.node.address)
    if interface is None:
        raise Unanswered(f"{target.node.name}: no network interface has its address {target.node.address}")
    return interface


def _sent(target: Target) -> dict[str, int]:
    lines = target.node.run(["sh", "-c", COUNTERS], timeout_s=20).stdout.split("\n")
    return {nic: int(count) for nic, count in (line.split() for line in lines if line)}


def _grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {nic: count - before.get(nic, 0) for nic, count in after.items()}


NETWORK = Check("network", run, once=True)
