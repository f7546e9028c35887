"""The Slurm allocation in which this process runs, for example made by `salloc` or for the job of a notebook."""

from __future__ import annotations

import re

import msgspec

from jobs import claim
from jobs.slurm import states
from jobs.slurm.commands import call_slurm, read_own_cluster
from shardlab.errors import InputError

_NODES_PATTERN = re.compile(r"\bNumNodes=(\d+)")
_STATE_PATTERN = re.compile(r"\bJobState=(\w+)")
_UNKNOWN_JOB = "Invalid job id"  # Slurm's words for a job that ended some minutes ago
_GPUS_PATTERN = re.compile(r"\b(?:AllocTRES|TRES)=\S*\bgres/gpu=(\d+)")


class Allocation(msgspec.Struct, frozen=True):
    """The resources of a Slurm allocation."""

    node_count: int
    gpus_per_node: int


def read_own_allocation() -> Allocation:
    """The allocation of this process. Raises InputError if this process is not in an allocation."""
    if not claim.read_own_job_id():
        raise InputError(
            "--in-allocation: this process is in no job of Slurm (SLURM_JOB_ID is not set); start it inside `salloc` or in a "
            "notebook's job, or leave --in-allocation out."
        )
    output = call_slurm(["scontrol", "--oneliner", "show", "job", claim.read_own_job_id()], cluster=read_own_cluster())
    allocation = parse_allocation(output.stdout)
    if output.exit_code != 0 or allocation is None:
        raise InputError(
            f"--in-allocation: Slurm does not say what the job {claim.read_own_job_id()} has: {output.error_line}."
        )
    return allocation


def has_ended(job_id: str) -> bool:
    """Whether an allocation has ended or is ending. False if Slurm does not answer."""
    output = call_slurm(["scontrol", "--oneliner", "show", "job", job_id], cluster=read_own_cluster())
    if output.exit_code != 0:
        return _UNKNOWN_JOB in output.stderr
    state_match = _STATE_PATTERN.search(output.stdout)
    return state_match is not None and (state_match[1] in states.RUN_STATE_BY_END or state_match[1] == "COMPLETING")


def parse_allocation(scontrol_output: str) -> Allocation | None:
    """Parse the allocation of a running job from the output of `scontrol show job`; None if the output does not name the nodes
    of the job."""
    nodes, gpus = _NODES_PATTERN.search(scontrol_output), _GPUS_PATTERN.search(scontrol_output)
    if nodes is None or not int(nodes[1]):
        return None
    return Allocation(int(nodes[1]), int(gpus[1]) // int(nodes[1]) if gpus else 0)
