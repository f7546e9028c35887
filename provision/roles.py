"""The order of the operations, and then of the checks, with the reason for each place."""

from __future__ import annotations

from typing import Any

from provision.checks import Check
from provision.checks.all_reduce import ALL_REDUCE
from provision.checks.clock import CLOCK
from provision.checks.compiled import COMPILES
from provision.checks.driver import DRIVER_WORKS
from provision.checks.environments import ENVIRONMENTS
from provision.checks.gpus import GPUS
from provision.checks.network import NETWORK
from provision.checks.rdma import RDMA_UP
from provision.checks.shared import SHARED
from provision.checks.slurm import SLURM
from provision.checks.torch import TORCH_IMPORTS
from provision.facts import Fact
from provision.facts.addresses import ADDRESSES
from provision.facts.host import HOST
from provision.facts.torch import TORCH
from provision.operations import Operation
from provision.operations.datasets import DATASETS
from provision.operations.disks import DISKS
from provision.operations.environment import SOFTWARE
from provision.operations.hosts import HOSTS
from provision.operations.inventory import INVENTORY
from provision.operations.keys import SSH_KEYS, SSH_TRUST
from provision.operations.munge import MUNGE, MUNGE_KEY
from provision.operations.nfs import NFS, NFS_SERVER
from provision.operations.nvidia import DRIVER
from provision.operations.packages import INSTALL
from provision.operations.rdma import LIBRARIES
from provision.operations.slurm import ACCOUNTS, CONTROLLER, REGISTERED, WORKERS
from provision.operations.space import SPACE
from provision.operations.time import CLOCK_OFFSET, TIME_SYNC
from provision.operations.users import MUNGE_USER, USERS_AGREE
from shardlab.cluster import Cluster

FACTS: list[Fact[Any]] = [
    HOST,  # first: cheap, and a node that cannot answer it has no shardlab
    ADDRESSES,
    TORCH,  # last: importing torch takes seconds
]

INSTALLATION: list[Operation] = [  # what a machine of its own needs, and this one, used as it is, does not
    SPACE,  # first: it refuses before anything is changed
    MUNGE_USER,  # before the package that would make it with a number of its own
    INSTALL,  # before all that configures what it installs
    USERS_AGREE,  # once all users are there, before anything is owned by them
    DRIVER,  # before anything runs that its reboot would end, and before torch, whose gigabytes an old GPU has no use for
    LIBRARIES,  # of RDMA; nothing waits for them but ranks
    HOSTS,  # before all that meets others by name
    TIME_SYNC,
    CLOCK_OFFSET,  # before munge, whose messages expire
    DISKS,  # before what is shared, which may lie on one
    NFS_SERVER,
    NFS,  # after the server, whose folder they mount; before the environment, which may lie there
    SSH_KEYS,  # all nodes', before any is told of the others'
    SSH_TRUST,
    MUNGE_KEY,  # on the controller, before it is copied
    MUNGE,
    ACCOUNTS,  # before the controller, which does not start without the accounts that it was told of
    CONTROLLER,
    WORKERS,  # after the controller, whose configuration they ask for
    REGISTERED,
    SOFTWARE,
]

OPERATIONS: list[Operation] = [
    DATASETS,
    INVENTORY,  # last of all operations: it records what the others have made
]

TOGETHER: list[Check] = [  # of nodes that work together
    CLOCK,
    SHARED,
    ENVIRONMENTS,
]

DEVICES: list[Check] = [
    DRIVER_WORKS,
    RDMA_UP,
]

CHECKS: list[Check] = [  # of torch on each node: one start of it answers all
    TORCH_IMPORTS,
    GPUS,
    ALL_REDUCE,
    COMPILES,
]


def operations(cluster: Cluster) -> list[Operation]:
    """The operations for a cluster, in their order."""
    return OPERATIONS if cluster.provider == "local" else [*INSTALLATION, *OPERATIONS]


def checks(cluster: Cluster) -> list[list[Check]]:
    """The checks for a cluster, in stages; the checks of a stage run at the same time, on all nodes."""
    if cluster.provider == "local":
        return [CHECKS]
    return [
        TOGETHER,  # first, and for a moment only: what takes the processor for seconds would blur the clocks
        [*DEVICES, *CHECKS, SLURM],  # they wait for different things, and what Slurm starts takes milliseconds
        [NETWORK],  # alone: it measures what all nodes share
    ]
