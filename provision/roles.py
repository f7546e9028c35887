"""The order in which things are made true and then checked, written once."""

from __future__ import annotations

from typing import Any

from provision.checks import Check
from provision.checks.all_reduce import ALL_REDUCE
from provision.checks.gpus import GPUS
from provision.checks.torch import TORCH_IMPORTS
from provision.facts import Fact
from provision.facts.addresses import ADDRESSES
from provision.facts.host import HOST
from provision.facts.torch import TORCH
from provision.operations import Operation
from provision.operations.datasets import DATASETS
from provision.operations.inventory import INVENTORY

FACTS: list[Fact[Any]] = [
    HOST,  # first: cheap, and a node that cannot answer it has no shardlab
    ADDRESSES,
    TORCH,  # last: importing torch takes seconds
]

OPERATIONS: list[Operation] = [
    DATASETS,
    INVENTORY,  # last of all operations: it records what the others have made
]

CHECKS: list[Check] = [
    TORCH_IMPORTS,  # first: the others cannot say anything without it
    GPUS,  # before ranks meet, since the number of GPUs decides how
    ALL_REDUCE,  # last: it needs everything above, as training does
]
