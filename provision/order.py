"""The order of the operations, and then of the checks, with the reason for each place.

On which nodes an operation acts, its own function `plan` says (provision/operations); `converge_site` of provision/plan.py
applies it to all nodes at the same time.
"""

from __future__ import annotations

from typing import Any

from provision.check import Check
from provision.checks.all_reduce import ALL_REDUCE
from provision.checks.clock import CLOCK
from provision.checks.compiled import COMPILES
from provision.checks.driver import DRIVER_WORKS
from provision.checks.environments import ENVIRONMENTS
from provision.checks.experiment_network import EXPERIMENT_NETWORK
from provision.checks.gpus import GPUS
from provision.checks.network import NETWORK
from provision.checks.node_types import SITE_NODES
from provision.checks.rdma import RDMA_UP
from provision.checks.shared import SHARED
from provision.checks.slurm import SLURM
from provision.checks.torch import TORCH_IMPORTS
from provision.fact import FactQuery
from provision.facts.addresses import ADDRESSES
from provision.facts.host import HOST
from provision.facts.torch import TORCH
from provision.operation import Operation
from provision.operations.datasets import DATASETS
from provision.operations.disks import DISKS
from provision.operations.environment import SOFTWARE
from provision.operations.extra_disks import EXTRA_DISKS
from provision.operations.hosts import HOSTS
from provision.operations.inventory import INVENTORY
from provision.operations.keys import SSH_KEYS, SSH_TRUST
from provision.operations.munge import MUNGE, MUNGE_KEY
from provision.operations.nfs import NFS, NFS_SERVER
from provision.operations.nvidia import DRIVER
from provision.operations.packages import INSTALL
from provision.operations.rdma import LIBRARIES
from provision.operations.site_environment import SITE_SOFTWARE
from provision.operations.slurm import ACCOUNTS, CONTROLLER, REGISTERED, WORKERS
from provision.operations.space import SPACE
from provision.operations.time import CLOCK_OFFSET, TIME_SYNC
from provision.operations.users import MUNGE_USER, USERS_AGREE
from provision.operations.workspaces import WORKSPACES
from provision.provider import Provider

ALL_FACTS: list[FactQuery[Any]] = [
    HOST,  # first, because this fact is cheap, and fails on a node without an installed shardlab
    ADDRESSES,
    TORCH,  # last, because to import torch takes seconds
]

ALL_OPERATIONS: list[Operation] = [
    SPACE,  # first: it refuses a node with too little disk space before anything is changed
    MUNGE_USER,  # the user munge is made before the package of MUNGE is installed, which would make this user with any UID
    INSTALL,  # packages are installed before the operations that configure them
    USERS_AGREE,  # users are compared when all users exist, and before they own any file
    DRIVER,  # before services, which a reboot for the driver would end; before torch, to refuse GPUs that torch cannot use
    LIBRARIES,  # the libraries of RDMA can be installed at any place before the checks, because only ranks use them
    HOSTS,  # names of nodes are written before the operations that reach other nodes by name
    TIME_SYNC,
    CLOCK_OFFSET,  # clocks are set before munge is set up, because munge's messages expire
    DISKS,  # disks are mounted before the shared folder is made, which may be on such a disk
    EXTRA_DISKS,  # extra disks of CloudLab nodes are mounted before the shared folder is made, for the same reason
    NFS_SERVER,
    NFS,  # nodes mount the folder after the server exports it, and before the environment is made, which may be in this folder
    SSH_KEYS,  # all nodes make their keys before a node gets the keys of the other nodes
    SSH_TRUST,
    MUNGE_KEY,  # the controller makes the munge key before it is copied to the other nodes
    MUNGE,
    ACCOUNTS,  # accounting is set up before the controller, which does not start without accounting
    CONTROLLER,
    WORKERS,  # workers are set up after the controller, from which they get their configuration
    REGISTERED,
    WORKSPACES,  # the folder is made after disks and mounts, which may hold it, and before the environment, which may be in it
    SOFTWARE,
    SITE_SOFTWARE,  # replaces SOFTWARE at Slurm sites, where users have no root
    DATASETS,
    INVENTORY,  # last: it records the result of the other operations
]

# Operations and checks of Slurm sites and CloudLab experiments, which apply only if a provider names them.
ONLY_NAMED = {SITE_SOFTWARE.name, SITE_NODES.name, EXTRA_DISKS.name, EXPERIMENT_NETWORK.name}

COMPARING_CHECKS: list[Check] = [  # checks that compare the nodes with each other
    CLOCK,
    SHARED,
    ENVIRONMENTS,
]

DEVICE_CHECKS: list[Check] = [
    DRIVER_WORKS,
    RDMA_UP,
    EXPERIMENT_NETWORK,
]

TORCH_CHECKS: list[Check] = [  # the checks of torch on each node, which share one import of torch
    TORCH_IMPORTS,
    GPUS,
    ALL_REDUCE,
    COMPILES,
]


# The checks that run again in each further environment of the cluster file, because its packages decide their results.
ENVIRONMENT_CHECKS: list[Check] = [ENVIRONMENTS, *TORCH_CHECKS, SITE_NODES]


def select_operations(provider: Provider[Any]) -> list[Operation]:
    """The operations that apply to the nodes of a provider, in their order."""
    return [
        operation
        for operation in ALL_OPERATIONS
        if _is_check_chosen(operation.name, provider.operations) or operation.name in provider.additional
    ]


def list_operation_files() -> list[str]:
    """The paths of all files that operations write, for the fact FILES."""
    return sorted({path for operation in ALL_OPERATIONS for path in operation.written_paths})


def select_checks(provider: Provider[Any]) -> list[list[Check]]:
    """The checks that apply to the nodes of a provider, as a list of stages. All checks of a stage run at the same time."""
    check_stages = [
        COMPARING_CHECKS,  # the first stage measures clocks, which checks that load the processor would disturb
        [*DEVICE_CHECKS, *TORCH_CHECKS, SLURM],  # they do not disturb each other: they use other devices, or only short jobs
        [NETWORK],  # this check is alone in its stage, because it measures the network, which all nodes share
        [SITE_NODES],  # this check tests compute nodes by jobs, because nobody trains on a login node
    ]
    return [
        [check for check in stage_checks if _is_check_chosen(check.name, provider.checks) or check.name in provider.additional]
        for stage_checks in check_stages
    ]


def _is_check_chosen(check_name: str, chosen_names: frozenset[str] | None) -> bool:
    return check_name not in ONLY_NAMED if chosen_names is None else check_name in chosen_names
