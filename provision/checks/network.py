"""Checks an all-reduce between all nodes, and that its data is sent only over the network on which the nodes train.

It uses NCCL if all nodes have GPUs that torch can use, else Gloo. The kernel's counters of an interface do not count RDMA: if
NCCL takes RDMA, its devices are checked instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from provision.check import Check, Outcome, absent_nodes_note, map_targets
from provision.checks.all_reduce import (
    BUS_BANDWIDTH_FORMULA,
    AllReduceReport,
    add_measurement,
    explain_failure,
    find_first_gpu_name,
    read_report,
)
from provision.checks.transport import judge_transport, read_transports
from provision.cloudlab import experiment_interfaces
from provision.fact import Unanswered
from provision.facts.addresses import ADDRESSES
from provision.facts.host import HOST
from provision.facts.rdma import RDMA, RdmaLink
from provision.facts.torch import TORCH
from provision.operation import Site, Target
from shardlab.cluster.all_reduce import compute_bus_bandwidth
from shardlab.hardware.nccl_log import NCCL_LOG, NcclTransports
from shardlab.remote.remote import CommandOutput

RENDEZVOUS_PORT = 29411
LIMIT_S = 240.0
# The most bytes that a node may send over a wrong interface during the test, as a share of the bytes of the all-reduce.
# Background traffic stays below this share.
MOST_STRAY_SHARE = 0.1
MOST_CONTROL_SHARE = 0.02  # the same share for the control network of an experiment, over which `provision` itself only logs in
PRINT_SENT_BYTES = "for f in /sys/class/net/*/statistics/tx_bytes; do n=${f#/sys/class/net/}; echo ${n%%/*} $(cat $f); done"
_VIRTUAL_NIC = re.compile(r"^(lo|docker|veth|vb-|br-)")


def run(site: Site, target: Target) -> Outcome:
    """Run an all-reduce of all nodes, and compare the counters of sent bytes before and after it. Raises Unanswered."""
    targets = site.active_targets
    if len(targets) < 2:
        return Outcome(None, f"there is only one node{absent_nodes_note(site)}")
    data_nics = [_find_interface(target) for target in targets]
    control_interfaces = [_find_control_interface(target) for target in targets]
    backend = "nccl" if all(_has_nccl(target) for target in targets) else "gloo"
    counters_before = map_targets(targets, _read_sent_bytes)
    rank_outputs = map_targets(targets, lambda member: _launch_rank(backend, targets, member, data_nics[targets.index(member)]))
    counters_after = map_targets(targets, _read_sent_bytes)
    failed_outputs = [(failing, output) for failing, output in zip(targets, rank_outputs, strict=True) if output.code != 0]
    if failed_outputs:
        first_failed, output = failed_outputs[0]
        failure_text = explain_failure(output, LIMIT_S)
        advice = (
            f"can the nodes reach {targets[0].node.address}:{RENDEZVOUS_PORT} and each other, or does a firewall block them?"
        )
        return Outcome(
            False,
            f"an all-reduce of {len(targets)} nodes failed; {first_failed.node.name}: {failure_text}",
            advice,
            transcript=output.stderr,
        )
    sent_bytes_by_node = [
        _subtract_counters(*counter_pair) for counter_pair in zip(counters_before, counters_after, strict=True)
    ]
    links_by_node = [target.facts[RDMA] for target in targets] if backend == "nccl" else []
    outcome = judge_network(
        rank_outputs, data_nics, sent_bytes_by_node, absent_nodes_note(site), control_interfaces, links_by_node
    )
    gpu_name = find_first_gpu_name(targets[0].facts[HOST]) if backend == "nccl" else None
    return add_measurement(outcome, rank_outputs[0], [member.node.name for member in targets], gpu_name)


def judge_network(
    rank_outputs: Sequence[CommandOutput],
    data_nics: list[str],
    sent_bytes_by_node: list[dict[str, int]],
    absent_note: str = "",
    control_interfaces: Sequence[tuple[str, str] | None] = (),
    links_by_node: Sequence[Sequence[RdmaLink]] = (),
) -> Outcome:
    """Returns a passed Outcome if the sums are exact and the data was sent over the right interfaces.

    rank_outputs: the output of the rank of each node, the first of which is rank 0. data_nics: the interface of each node that
    should carry the data. sent_bytes_by_node: for each node, the bytes sent during the test, by interface. absent_note: names
    the nodes that did not take part, such as `; without gpu1`. control_interfaces: for each node, (name of the node, name of
    its interface on the control network of an experiment); None: the node is on no control network. links_by_node: the RDMA
    links of each node."""
    try:
        report = read_report(rank_outputs[0])
    except ValueError as error:
        return Outcome(
            False, f"the output of the all-reduce cannot be read: {error}", "try again: provision CLUSTER.yaml verify"
        )
    if report.wrong:
        return Outcome(
            False, f"{report.wrong} wrong sums between nodes", "do not train here: check the network cards and memory"
        )
    nccl_transports = read_transports(rank_outputs)
    intended_bytes = min(bytes_by_nic.get(nic, 0) for nic, bytes_by_nic in zip(data_nics, sent_bytes_by_node, strict=True))
    stray_phrases = _describe_strays(data_nics, sent_bytes_by_node, MOST_STRAY_SHARE * intended_bytes)
    expected_bytes = 2 * (report.ranks - 1) / report.ranks * report.bytes * report.iterations
    nic_names = ", ".join(sorted(set(data_nics)))
    if control_devices := _describe_control_devices(control_interfaces, links_by_node, nccl_transports):
        return Outcome(
            False,
            f"NCCL uses RDMA over the control network, which is only for logins: {', '.join(control_devices)}",
            "name the devices of the experiment network in /etc/nccl.conf of each node: NCCL_IB_HCA==mlx5_2 (docs/networks.md)",
        )
    if control_phrases := _describe_control_traffic(control_interfaces, sent_bytes_by_node, expected_bytes):
        text = f"the control network, which is only for logins, carried data of the all-reduce: {', '.join(control_phrases)}"
        return Outcome(
            False,
            f"{text}; each node sends {expected_bytes / 1e6:.0f} MB, over {nic_names}",
            "are the addresses of the nodes in the cluster file those of the experiment network, and does /etc/hosts on each "
            "node list these addresses?",
        )
    # The counters of interfaces count no RDMA. If NCCL's log names no transport, only they can show where the data was sent.
    lacks_transport = report.backend == "nccl" and not nccl_transports.channels
    is_kernel_counted = report.backend != "nccl" or nccl_transports.rdma is False or lacks_transport
    if is_kernel_counted and (stray_phrases or intended_bytes < expected_bytes * 0.9):
        elsewhere = ", ".join(stray_phrases) or "nothing"
        text = f"{intended_bytes / 1e6:.0f} of {expected_bytes / 1e6:.0f} MB were sent over {nic_names}; elsewhere: {elsewhere}"
        advice = "which interface has the nodes' addresses (ip addr), and does /etc/hosts list these addresses?"
        if lacks_transport:
            text += "; RDMA cannot be ruled out, because NCCL's log names no transport"
            advice = "remove NCCL_DEBUG_FILE from /etc/nccl.conf and ~/.nccl.conf of the nodes"
        return Outcome(False, text, advice)
    return _make_passed_outcome(report, nic_names, absent_note, nccl_transports, links_by_node)


def _describe_strays(nics: Sequence[str], sent_bytes_by_node: Sequence[dict[str, int]], background_bytes: float) -> list[str]:
    """A phrase for each other interface of a node that sent over `background_bytes`. nics, sent_bytes_by_node: as in
    `judge_network`."""
    return [
        f"{nic} {sent_bytes / 1e6:.0f} MB"
        for data_nic, bytes_by_nic in zip(nics, sent_bytes_by_node, strict=True)
        for nic, sent_bytes in bytes_by_nic.items()
        if nic != data_nic and not _VIRTUAL_NIC.match(nic) and sent_bytes > background_bytes
    ]


def _make_passed_outcome(
    report: AllReduceReport,
    nic_names: str,
    absent_note: str,
    transports: NcclTransports,
    links_by_node: Sequence[Sequence[RdmaLink]],
) -> Outcome:
    """The passed Outcome of an all-reduce, with what was measured and which transport NCCL took. Arguments: as in
    `judge_network`."""
    bytes_per_s = compute_bus_bandwidth(report.ranks, report.bytes, report.time_s)
    report_values = {value_name: value for value_name, value in msgspec.to_builtins(report).items() if value_name != "times"}
    measured_values = {**report_values, "bus_bandwidth_gb_per_s": bytes_per_s / 1e9, "formula": BUS_BANDWIDTH_FORMULA}
    bandwidth_text = f"bus bandwidth {bytes_per_s / 1e9 * 8:.2f} Gbit/s ({BUS_BANDWIDTH_FORMULA}){absent_note}"
    success_text, advice = f"all-reduce of {report.ranks} nodes over {nic_names} is exact; {bandwidth_text}", None
    if report.backend == "nccl":
        active_links = [link.name for node_links in links_by_node for link in node_links if link.state == "ACTIVE"]
        transport_clause, advice = judge_transport(transports, active_links)
        success_text += transport_clause
    return Outcome(True, success_text, advice, measured=measured_values)


def _describe_control_devices(
    control_interfaces: Sequence[tuple[str, str] | None],
    links_by_node: Sequence[Sequence[RdmaLink]],
    transports: NcclTransports,
) -> list[str]:
    """A phrase for each node of which NCCL may use an RDMA device that belongs to the interface on the control network."""
    if "NET/IB" not in transports.channels:
        return []
    used_devices = {label.partition(" ")[0] for label in transports.devices}
    return [
        f"{control_interface[0]} {link.device} ({control_interface[1]})"
        for control_interface, node_links in zip(control_interfaces, links_by_node)
        for link in node_links
        if control_interface is not None and link.nic == control_interface[1] and link.device in used_devices
    ]


def _describe_control_traffic(
    control_interfaces: Sequence[tuple[str, str] | None], sent_bytes_by_node: Sequence[dict[str, int]], expected_bytes: float
) -> list[str]:
    """A phrase for each node that sent more than background traffic over the control network.

    control_interfaces, sent_bytes_by_node: as for `judge_network`. expected_bytes: the bytes that each node has to send for the
    all-reduce."""
    return [
        f"{node_name} sent {sent_by_nic[interface] / 1e6:.0f} MB over {interface}"
        for (node_name, interface), sent_by_nic in (
            (control, sent_by_nic)
            for control, sent_by_nic in zip(control_interfaces, sent_bytes_by_node)
            if control is not None
        )
        if sent_by_nic.get(interface, 0) > MOST_CONTROL_SHARE * expected_bytes
    ]


def _find_control_interface(target: Target) -> tuple[str, str] | None:
    interfaces = experiment_interfaces.find_node_interfaces(target)
    interface_name = interfaces.control.interface if interfaces is not None else None
    return (target.node.name, interface_name) if interface_name is not None else None


def _has_nccl(target: Target) -> bool:
    torch_properties = target.facts[TORCH]
    return bool(torch_properties.gpus) and "nccl" in torch_properties.backends


def _launch_rank(backend: str, targets: list[Target], rank_target: Target, nic: str) -> CommandOutput:
    python_path = rank_target.node.python
    rank, first_address = targets.index(rank_target), targets[0].node.address
    rank_words = [
        python_path,
        "-m",
        "provision.checks._all_reduce_ranks",
        backend,
        str(len(targets)),
        str(rank),
        f"{first_address}:{RENDEZVOUS_PORT}",
    ]
    interface_variables = {"GLOO_SOCKET_IFNAME": nic, "NCCL_SOCKET_IFNAME": f"={nic}"}
    return rank_target.node.run(rank_words, timeout_s=LIMIT_S, env={"OMP_NUM_THREADS": "1", **interface_variables, **NCCL_LOG})


def _find_interface(target: Target) -> str:
    interface = experiment_interfaces.find_interface_name(target.facts[ADDRESSES], target.node.address)
    if interface is None:
        raise Unanswered(f"{target.node.name}: no network interface has its address {target.node.address}")
    return interface


def _read_sent_bytes(target: Target) -> dict[str, int]:
    counter_lines = target.node.run(["sh", "-c", PRINT_SENT_BYTES], timeout_s=20).stdout.split("\n")
    return {nic: int(byte_text) for nic, byte_text in (counter_line.split() for counter_line in counter_lines if counter_line)}


def _subtract_counters(earlier_by_nic: dict[str, int], later_by_nic: dict[str, int]) -> dict[str, int]:
    return {nic: byte_count - earlier_by_nic.get(nic, 0) for nic, byte_count in later_by_nic.items()}


NETWORK = Check("network", run, once=True)
