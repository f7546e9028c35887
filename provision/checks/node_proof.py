"""The results of the nodes of a site in a proof job."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from provision.checks.trial import Trial
from provision.facts.rdma import RdmaLink
from shardlab.host import Host
from shardlab.remote import CommandOutput

MEET_S = 120.0  # how long nodes wait for each other


class NodeProof(msgspec.Struct, frozen=True):
    """The result of one node of a proof job."""

    host: Host
    trial: Trial
    words: list[str]  # names of the nodes whose files this node saw in the shared folder
    tasks: int  # nodes of the job
    free_bytes: int  # of the shared folder
    free_inodes: int | None  # None: the file system counts none
    together: CommandOutput | None = None  # the all-reduce of all nodes; None: the job had one node, or torch does not work
    rdma: list[RdmaLink] = []


class Proofs(NamedTuple):
    """What lies in the folder of a node type's proof."""

    nodes: list[NodeProof]
    job: str | None  # its number; None: no job was submitted
    state: str  # Slurm's words for it, such as `PENDING Resources`; ENDED: Slurm does not have it any more

    def has_all(self) -> bool:
        """Whether every node of the job wrote its result."""
        return bool(self.nodes) and len(self.nodes) >= self.nodes[0].tasks
