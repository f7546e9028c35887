"""What each of Slurm's states is to us (man squeue and man sacct, 21.08 to 25.11); one that we do not know is unknown."""

from __future__ import annotations

WAITING = {
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "EXPEDITING",
    "POWER_UP_NODE",
}  # fmt: skip
AT_WORK = {"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "UPDATE_DB"}
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
    "REVOKED": "unknown",  # its siblings in a federation run elsewhere
}
# After these Slurm may start a job again, which its accounts tell some seconds later.
AGAIN = {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL"}
WHY = {
    "TIMEOUT": "Slurm ended it at the job's time limit",
    "DEADLINE": "Slurm ended it at its deadline",
    "OUT_OF_MEMORY": "out of host memory: Slurm saw the kernel's OOM killer end a process of the job",
    "NODE_FAIL": "a node of the job failed",
    "BOOT_FAIL": "a node of the job did not boot",
    "LAUNCH_FAILED": "Slurm could not launch it on its nodes",
    "RECONFIG_FAIL": "a node of the job could not be reconfigured",
    "PREEMPTED": "Slurm ended it in favour of another job",
    "CANCELLED": "cancelled in Slurm",
}


def word(raw: str) -> str:
    """The state in Slurm's words: `CANCELLED by 1000` and `COMPLETING+` begin with it."""
    return raw.split()[0].rstrip("+").upper() if raw.split() else ""


def ours(raw: str) -> str:
    """pending, running, an end, or unknown."""
    state = word(raw)
    if state in WAITING:
        return "pending"
    return "running" if state in AT_WORK else ENDED.get(state, "unknown")


def settled(raw: str) -> bool:
    """Whether a job of which the accounts say this has ended for good."""
    return ours(raw) in ENDED.values() and word(raw) not in AGAIN
