"""The results of a proof job, which tests on compute nodes of a Slurm site whether they can train."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from provision.checks.trial import Trial
from provision.facts.rdma import RdmaLink
from shardlab.hardware.host import Host
from shardlab.remote.remote import CommandOutput

MEET_S = 120.0  # the most seconds that the nodes of a proof job wait for each other


class NodeProof(msgspec.Struct, frozen=True):
    """The result of one node of a proof job."""

    host: Host
    trial: Trial
    words: list[str]
    """Names of the nodes whose files this node saw in the shared folder."""
    tasks: int
    """Number of nodes of the job, which runs one task on each node."""
    free_bytes: int
    """Free bytes in the file system of the shared folder."""
    free_inodes: int | None
    """Free inodes in the file system of the shared folder; None: inodes are not counted."""
    together: CommandOutput | None = None
    """The all-reduce between the nodes; None: it did not run."""
    rdma: list[RdmaLink] = []
    slingshot: list[str] = []
    """The Slingshot devices, such as cxi0; the kernel does not list them among the RDMA devices."""


class ProofResults(NamedTuple):
    """The content of the folder in which a proof job writes its results."""

    proofs: list[NodeProof]
    """One result per node that has written its result."""
    job_id: str | None
    """The Slurm job id; None: no job was submitted."""
    job_state: str
    """State and reason as squeue prints them, such as `PENDING Resources`; ENDED: squeue does not list the job."""

    def has_all(self) -> bool:
        """Whether every node of the job wrote its result."""
        return bool(self.proofs) and len(self.proofs) >= self.proofs[0].tasks
