"""A Slurm that is already installed on the nodes (provider ssh): shardlab uses this Slurm as it is and does not change it."""

from __future__ import annotations

import shlex

from provision.fact import Unanswered
from provision.facts.slurm_here import SLURM_HERE, KnownNode, SlurmHere
from provision.operation import Nothing, Site, Target

UNUSABLE = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "FUTURE", "INVAL", "NOT_RESPONDING", "UNKNOWN"}


def existing(site: Site) -> SlurmHere | None:
    """A Slurm on the nodes, not set up by shardlab, whose controller answers; None if there is no such Slurm.

    On nodes without root, a Slurm that answers counts as existing even if shardlab set it up. Raises Unanswered if there
    is a slurm.conf that shardlab did not write and no controller answers, or if only a login shell finds Slurm's commands.
    """
    if site.cluster.slurm is None or site.cluster.provider != "ssh":
        return None
    told = site.answers(SLURM_HERE)
    if any(here.is_ours and target.node.may_sudo for target, here in told):
        return None
    for target, here in told:
        if here.answers and not here.is_in_path:
            raise _at(
                target,
                f"Slurm's commands are in {here.commands}, which only a login shell has in its PATH, so jobs could not use "
                f"them. Add this line at the beginning of ~/.bashrc there: export PATH=$PATH:{shlex.quote(here.commands)}",
            )
    if (answering := next((here for _, here in told if here.answers), None)) is not None:
        return answering
    for target, here in told:
        if here.conf and not here.is_ours:
            raise _at(
                target,
                f"{here.conf} was not written by shardlab, and Slurm's controller does not answer. Nothing of this Slurm was "
                "changed. Start it, to use it as it is; or remove this Slurm, to have shardlab install one",
            )
    return None


def used(there: SlurmHere) -> Nothing:
    """The result of an operation that would set up Slurm, if the nodes have a Slurm already: there is nothing to change."""
    return Nothing(f"uses the Slurm that is there (cluster {there.cluster}, version {there.version}), which is not changed")


def check(site: Site, there: SlurmHere) -> Nothing:
    """Check that the existing Slurm has all workers in the partition that the cluster file names.

    Raises Unanswered, which says what to tell the administrator of this Slurm.
    """
    assert site.cluster.slurm is not None
    partition = site.cluster.slurm.partition
    name = f"the Slurm that is there (cluster {there.cluster})"
    if partition not in there.partitions:
        raise Unanswered(
            f"{name} has no partition {partition}. It has: {', '.join(there.partitions) or 'none that this user may see'}. Set "
            f"slurm.partition to one of them, or tell its administrator: the partition {partition} is missing."
        )
    workers = [target for target in site.with_role("worker") if target.node.name not in site.skipped]
    faults = {target.node.name: fault for target in workers if (fault := _fault(target, there, partition))}
    if faults:
        raise Unanswered("; ".join(faults.values()), faults)
    return Nothing(f"{name} knows {len(workers)} workers, in the partition {partition}")


def _fault(target: Target, there: SlurmHere, partition: str) -> str | None:
    """Why the existing Slurm cannot run jobs on a worker, in a sentence; None if it can."""
    name, slurm = target.node.name, f"the Slurm that is there (cluster {there.cluster})"
    node = next((node for node in there.nodes if node.name == name), None)
    if node is None:
        if (other := _under_another_name(target, there)) is not None:
            return f"{name}: {slurm} calls this node {other.name}: write `name: {other.name}` for it in cluster.yaml"
        line = f"NodeName={name} NodeAddr={target.node.host}"
        return (
            f"{name}: {slurm} does not know this node. Tell its administrator: add the node to slurm.conf ({line}, and what "
            f"slurmd -C prints there), to the partition {partition}, and start slurmd on it"
        )
    if partition not in node.partitions:
        found = ", ".join(node.partitions) or "no partition"
        return (
            f"{name}: {slurm} has this node in {found}, not in {partition}. Tell its administrator: add {name} to the "
            f"partition {partition}; or set slurm.partition"
        )
    # Slurm appends * to the state of a node that does not answer.
    if UNUSABLE & set(node.state.rstrip("*").split("+")) or node.state.endswith("*"):
        reason = f"the reason is shown by: scontrol show node {name}"
        return f"{name}: {slurm} reports the state {node.state}. Tell its administrator; {reason}"
    return None


def _under_another_name(target: Target, there: SlurmHere) -> KnownNode | None:
    known = {target.node.name, target.node.host}
    return next((node for node in there.nodes if {node.hostname, node.address} & known), None)


def _at(target: Target, why: str) -> Unanswered:
    said = f"{target.node.name}: {why}."
    return Unanswered(said, {target.node.name: said})
