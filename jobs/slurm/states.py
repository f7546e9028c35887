"""Maps Slurm's job states (man squeue and man sacct, 21.08 to 25.11) to states of runs; other words become `unknown`."""

from __future__ import annotations

WAITING_STATES = {
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "EXPEDITING",
    "POWER_UP_NODE",
}  # fmt: skip
RUNNING_STATES = {"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "UPDATE_DB"}
RUN_STATE_BY_END = {
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
CLAUSE_BY_END_STATE = {
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


def extract_state(slurm_text: str) -> str:
    """The bare state in Slurm's text for a state, such as CANCELLED in `CANCELLED by 1000`, or COMPLETING in `COMPLETING+`."""
    return slurm_text.split()[0].rstrip("+").upper() if slurm_text.split() else ""


def translate_state(slurm_text: str) -> str:
    """Translate Slurm's state of a job to the state of its run: pending, running, a final state, or unknown."""
    state = extract_state(slurm_text)
    if state in WAITING_STATES:
        return "pending"
    return "running" if state in RUNNING_STATES else RUN_STATE_BY_END.get(state, "unknown")


def is_settled(slurm_text: str) -> bool:
    """Whether a job with this state in the accounting has ended for good."""
    return extract_state(slurm_text) in RUN_STATE_BY_END.keys() - RESTARTABLE_STATES
