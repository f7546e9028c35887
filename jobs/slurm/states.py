"""Maps Slurm's job states (man squeue and man sacct, 21.08 to 25.11) to states of runs; other words become `unknown`."""

from __future__ import annotations

import re

WAITING_STATES = {
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "EXPEDITING",
    "POWER_UP_NODE",
}  # fmt: skip
RUNNING_STATES = {"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "UPDATE_DB"}
ENDED = {
    "COMPLETED": "completed",
    "FAILED": "failed",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "CANCELLED": "cancelled",
    "OUT_OF_MEMORY": "oom",
    "NODE_FAIL": "node_fail",
    "BOOT_FAIL": "node_fail",
    "LAUNCH_FAILED": "node_fail",
    "RECONFIG_FAIL": "node_fail",
    "PREEMPTED": "preempted",
    "REVOKED": "unknown",  # in a federation of clusters: the job was started on another cluster
}
# After these states, Slurm may start the job again. The accounting shows the new start only some seconds later.
RESTARTABLE_STATES = {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL"}
WHY = {
    "TIMEOUT": "Slurm ended the job at its time limit",
    "DEADLINE": "Slurm ended the job at its deadline",
    "OUT_OF_MEMORY": "out of host memory: Slurm saw the kernel's OOM killer end a process of the job",
    "NODE_FAIL": "a node of the job failed",
    "BOOT_FAIL": "a node of the job did not boot",
    "LAUNCH_FAILED": "Slurm could not launch the job on its nodes",
    "RECONFIG_FAIL": "a node of the job could not be reconfigured",
    "PREEMPTED": "Slurm preempted the job in favour of another job",
    "CANCELLED": "cancelled in Slurm",
}

HELD_AFTER_LAUNCH = re.compile("JobHoldMaxRequeue|launch.failed.requeued.held")
# Why a job waits, in Slurm's words (`%r` of squeue), for reasons that do not pass by themselves or that a person should know:
# the pattern of the reason, and the sentence, in which REASON stands for Slurm's words.
WAITS = {
    HELD_AFTER_LAUNCH: "Slurm holds it after a failed start (REASON): `jobs retry` or `jobs retry --only held` releases it",
    re.compile("JobHeldUser"): "its job is held (REASON): `scontrol release` with its number lets it start",
    re.compile("JobHeldAdmin"): "an administrator of the cluster holds its job (REASON) and can release it",
    re.compile(
        "PartitionTimeLimit"
    ): "Slurm never starts it, because its time limit is above the limit of the partition (REASON): "
    "cancel it, then lower `time_limit` of the cell or slurm.time, or change slurm.partition, and submit it again",
    re.compile("PartitionNodeLimit"): "it asks for more or fewer nodes than the partition has now, without nodes that are down "
    "(REASON): if `sinfo` shows too few nodes, cancel it, then change `nnodes` of the cell or slurm.partition",
    re.compile("Partition(Down|Inactive)"): "its partition is down (REASON): it starts when the partition is up",
    re.compile("BadConstraints"): "no node fits its request (REASON): if no node is down, cancel it, then change "
    "slurm.constraint, slurm.gpu_request or slurm.mem, and submit it again",
    re.compile("DependencyNeverSatisfied"): "Slurm never starts it, because a job that it waits for did not end as required "
    "(REASON): cancel it and submit it again",
    re.compile("InvalidAccount|AccountNotAllowed"): "Slurm does not accept its account (REASON): cancel it, then change "
    "slurm.account, and submit it again",
    re.compile(
        "InvalidQOS|QOSNotAllowed"
    ): "Slurm does not accept its QOS (REASON): cancel it, then change slurm.qos, and submit it again",
    re.compile(
        "ReqNodeNotAvail|Reservation"
    ): "nodes that it needs are down, drained or reserved (REASON): `sinfo -R` says why",
    re.compile(
        "(Assoc|QOS)Max.*Per(Job|Node)"
    ): "Slurm never starts it, because it asks for more than one job may have (REASON): "
    "cancel it, then ask for less, and submit it again; `sacctmgr show assoc` and `sacctmgr show qos` show the limits",
    re.compile(
        "(Assoc|QOS)(Grp|Max)"
    ): "a limit of its account or QOS is used up (REASON): it starts when other jobs have ended",
}


def explain_waiting(reason: str) -> str:
    """A sentence about the reason for which a job waits, from WAITS; '' for other reasons, which pass by themselves."""
    return next((text.replace("REASON", reason) for pattern, text in WAITS.items() if pattern.match(reason)), "")


def bare_state(raw: str) -> str:
    """The bare state in Slurm's text for a state, such as CANCELLED in `CANCELLED by 1000`, or COMPLETING in `COMPLETING+`."""
    return raw.split()[0].rstrip("+").upper() if raw.split() else ""


def translate_state(raw: str) -> str:
    """Translate Slurm's state of a job to the state of its run: pending, running, a final state, or unknown."""
    state = bare_state(raw)
    if state in WAITING_STATES:
        return "pending"
    return "running" if state in RUNNING_STATES else ENDED.get(state, "unknown")


def is_settled(raw: str) -> bool:
    """Whether a job with this state in the accounting has ended for good."""
    return bare_state(raw) in ENDED.keys() - RESTARTABLE_STATES
