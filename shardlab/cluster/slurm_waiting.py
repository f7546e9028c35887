"""Why a job waits in Slurm's queue, and what helps."""

from __future__ import annotations

import re

import msgspec


class WaitingAdvice(msgspec.Struct, frozen=True):
    """The words of the clauses in WAITS that depend on who submitted the job."""

    release_advice: str
    """How a job is released that Slurm holds."""
    time_keys: str
    """What decides the time limit of the job."""
    node_keys: str
    """What decides the number of nodes of the job."""
    resubmit_advice: str
    """How the job is submitted again."""


FOR_RUNS = WaitingAdvice(
    "`jobs retry` or `jobs retry --only held` releases it",
    "`time_limit` of the cell or slurm.time",
    "`nnodes`",
    "submit it again",
)
FOR_PROVISION = WaitingAdvice(
    "`scontrol release` with its number lets it start",
    "slurm.max_time or slurm.provision.time",
    "slurm.max_nodes",
    "run the command again",
)
HELD_AFTER_LAUNCH = re.compile("JobHoldMaxRequeue|launch.failed.requeued.held")
# The reasons for which a job waits (`%r` of squeue) that do not pass by themselves or that a person should know. Each is a
# pattern of Slurm's words, with a clause that says what helps; Slurm's words are added in brackets.
WAITS = {
    HELD_AFTER_LAUNCH.pattern: "Slurm holds it after a failed start; {advice.release_advice}",
    "JobHeldUser": "its job is held; `scontrol release` with its number lets it start",
    "JobHeldAdmin": "an administrator of the cluster holds its job and can release it",
    "PartitionTimeLimit": "Slurm never starts it, because its time limit is above the limit of the partition; cancel it, lower "
    "{advice.time_keys}, or change slurm.partition, and {advice.resubmit_advice}",
    "PartitionNodeLimit": "its partition has too few nodes for it now; if no node is down, cancel it and change "
    "{advice.node_keys} or slurm.partition",
    "Partition(Down|Inactive)": "it starts when its partition is up",
    "BadConstraints": "no node fits it; if no node is down, cancel it and change slurm.constraint, slurm.gpu_request or "
    "slurm.mem",
    "DependencyNeverSatisfied": "Slurm never starts it, because a job that it waits for did not end as required; cancel it and "
    "{advice.resubmit_advice}",
    "InvalidAccount|AccountNotAllowed": "Slurm does not accept its account; cancel it and change slurm.account",
    "InvalidQOS|QOSNotAllowed": "Slurm does not accept its QOS; cancel it and change slurm.qos",
    "ReqNodeNotAvail|Reservation": "nodes that it needs are down, drained or reserved; `sinfo -R` says why",
    "(Assoc|QOS)Max.*Per(Job|Node)": "Slurm never starts it, because it asks for more than one job may have; cancel it and ask "
    "for less (`sacctmgr show assoc` and `sacctmgr show qos` show the limits)",
    "(Assoc|QOS)(Grp|Max)": "a limit of its account or QOS is used up; it starts when other jobs have ended",
}


def explain_waiting(waiting_reason: str, advice: WaitingAdvice) -> str:
    """A clause about the reason for which a job waits, from WAITS; '' for other reasons, which pass by themselves."""
    clause = next((clause for pattern, clause in WAITS.items() if re.match(pattern, waiting_reason)), None)
    return f"{clause.format(advice=advice)} ({waiting_reason})" if clause is not None else ""
