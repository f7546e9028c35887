"""The order in which things are made true and then checked, written once."""

from __future__ import annotations

from typing import Any

from provision.checks import Check
from provision.checks.all_reduce import ALL_REDUCE
from provision.checks.clock import CLOCK
from provision.checks.environments import ENVIRONMENTS
from provision.checks.gpus import GPUS
from provision.checks.network import NETWORK
from provision.checks.shared import SHARED
from provision.checks.slurm import SLURM
from provision.checks.torch import TORCH_IMPORTS
from provision.facts import Fact
from provision.facts.addresses import ADDRESSES
from provision.facts.host import HOST
from provision.facts.system import SYSTEM
from provision.facts.torch import TORCH
from provision.operations import Operation
from provision.operations.datasets import DATASETS
from provision.operations.environment import SOFTWARE
from provision.operations.hosts import HOSTS
from provision.operations.inventory import INVENTORY
from provision.operations.munge import MUNGE, MUNGE_KEY
from provision.operations.packages import INSTALL
from provision.operations.slurm import ACCOUNTS, CONTROLLER, REGISTERED, WORKERS

FACTS: list[Fact[Any]] = [
    SYSTEM,
    HOST,  # first: cheap, and a node that cannot answer it has no shardlab
    ADDRESSES,
    TORCH,  # last: importing torch takes seconds
]

OPERATIONS: list[Operation] = [
    INSTALL,  # first: what follows configures what it installs
    HOSTS,  # before all that meets others by name
    MUNGE_KEY,  # on the controller, before it is copied
    MUNGE,
    ACCOUNTS,  # before the controller, which does not start without the accounts that it was told of
    CONTROLLER,
    WORKERS,  # after the controller, whose configuration they ask for
    REGISTERED,
    SOFTWARE,
    DATASETS,  # by the environment's interpreter
    INVENTORY,  # last of all operations: it records what the others have made
]

CHECKS: list[Check] = [
    CLOCK,  # first: what follows compares times
    SHARED,
    ENVIRONMENTS,
    TORCH_IMPORTS,  # before ranks meet: they cannot say anything without it
    GPUS,  # before ranks meet, since the number of GPUs decides how
    ALL_REDUCE,
    NETWORK,
    SLURM,  # last: it needs everything above, as jobs do
]
