"""A Slurm that is already installed on the nodes (provider ssh): shardlab uses this Slurm as it is and does not change it."""

from __future__ import annotations

import shlex

from provision.fact import Unanswered
from provision.facts.slurm_here import SLURM_HERE, KnownNode, SlurmHere
from provision.operation import Nothing, Site, Target
from shardlab.cluster.cluster_keys import HOST_NAME

UNUSABLE_STATES = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "FUTURE", "INVAL", "NOT_RESPONDING", "UNKNOWN"}


def find_existing_slurm(site: Site) -> SlurmHere | None:
    """A Slurm on the nodes, not set up by shardlab, whose controller answers; None if there is no such Slurm.

    On nodes without root, a Slurm that answers counts as existing even if shardlab set it up. Raises Unanswered if there
    is a slurm.conf that shardlab did not write and no controller answers, or if only a login shell finds Slurm's commands.
    """
    if site.cluster.slurm is None or site.cluster.provider != "ssh":
        return None
    slurm_answers = site.collect_answers(SLURM_HERE)
    if any(slurm.is_ours and target.node.may_sudo for target, slurm in slurm_answers):
        return None
    for target, slurm in slurm_answers:
        if slurm.answers and not slurm.is_in_path:
            raise _make_error(
                target,
                f"Slurm's commands are in {slurm.commands}, which only a login shell has in its PATH, so jobs could not use "
                f"them. Add this line at the beginning of ~/.bashrc there: export PATH=$PATH:{shlex.quote(slurm.commands)}",
            )
    if (answering_slurm := next((slurm for _, slurm in slurm_answers if slurm.answers), None)) is not None:
        return answering_slurm
    for target, slurm in slurm_answers:
        if slurm.conf and not slurm.is_ours:
            raise _make_error(
                target,
                f"{slurm.conf} was not written by shardlab, and Slurm's controller does not answer. Nothing of this Slurm "
                "was changed. Start it, to use it as it is; or remove this Slurm, to have shardlab install one",
            )
    for target in site.active_targets:
        if not HOST_NAME.match(target.node.name):
            allowed = "at most 31 small letters, digits and hyphens"
            raise _make_error(target, f"no Slurm is installed that uses this name. Allowed for a Slurm of shardlab: {allowed}")
    return None


def report_existing_slurm(running: SlurmHere) -> Nothing:
    """The result of an operation that would set up Slurm, if the nodes have a Slurm already: there is nothing to change."""
    return Nothing(f"uses the Slurm that is there (cluster {running.cluster}, version {running.version}), which is not changed")


def check_existing_slurm(site: Site, running: SlurmHere) -> Nothing:
    """Check that the existing Slurm has all workers in the partition that the cluster file names.

    Raises Unanswered, which says what to tell the administrator of this Slurm.
    """
    assert site.cluster.slurm is not None
    partition = site.cluster.slurm.partition
    name = f"the Slurm that is there (cluster {running.cluster})"
    if partition not in running.partitions:
        raise Unanswered(
            f"{name} has no partition {partition}. It has: {', '.join(running.partitions) or 'none that this user may see'}. "
            f"Set slurm.partition to one of them, or tell its administrator: the partition {partition} is missing."
        )
    workers = [target for target in site.list_with_role("worker") if target.node.name not in site.skipped]
    fault_by_node = {target.node.name: fault for target in workers if (fault := _find_worker_fault(target, running, partition))}
    if fault_by_node:
        raise Unanswered("; ".join(fault_by_node.values()), fault_by_node)
    return Nothing(f"{name} knows {len(workers)} workers, in the partition {partition}")


def _find_worker_fault(target: Target, existing_slurm: SlurmHere, partition: str) -> str | None:
    """Why the existing Slurm cannot run jobs on a worker, in a sentence; None if it can."""
    name, slurm = target.node.name, f"the Slurm that is there (cluster {existing_slurm.cluster})"
    known_node = next((known_node for known_node in existing_slurm.nodes if known_node.name == name), None)
    if known_node is None:
        if (other_node := _find_other_name(target, existing_slurm)) is not None:
            return f"{name}: {slurm} calls this node {other_node.name}: write `name: {other_node.name}` for it in cluster.yaml"
        line = f"NodeName={name} NodeAddr={target.node.host}"
        return (
            f"{name}: {slurm} does not know this node. Tell its administrator: add the node to slurm.conf ({line}, and what "
            f"slurmd -C prints there), to the partition {partition}, and start slurmd on it"
        )
    if partition not in known_node.partitions:
        partition_names = ", ".join(known_node.partitions) or "no partition"
        return (
            f"{name}: {slurm} has this node in {partition_names}, not in {partition}. Tell its administrator: add {name} to "
            f"the partition {partition}; or set slurm.partition"
        )
    # Slurm appends * to the state of a node that does not answer.
    if UNUSABLE_STATES & set(known_node.state.rstrip("*").split("+")) or known_node.state.endswith("*"):
        reason_clause = f"the reason is shown by: scontrol show node {name}"
        return f"{name}: {slurm} reports the state {known_node.state}. Tell its administrator; {reason_clause}"
    return None


def _find_other_name(target: Target, existing_slurm: SlurmHere) -> KnownNode | None:
    node_names = {target.node.name, target.node.host}
    return next((node for node in existing_slurm.nodes if {node.hostname, node.address} & node_names), None)


def _make_error(target: Target, fault_text: str) -> Unanswered:
    message = f"{target.node.name}: {fault_text}."
    return Unanswered(message, {target.node.name: message})
