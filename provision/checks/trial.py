"""The results of the checks of torch on a node. They run once for all checks that need them: importing torch takes seconds."""

from __future__ import annotations

import msgspec

from provision.fact import Fact, decode
from provision.facts.torch import TORCH, Torch
from provision.operation import Target
from shardlab.remote import CommandOutput

RANKS = 2
LOOK_S = 180.0
RANKS_S = 195.0  # the ranks themselves give up waiting for one another after 180 s
PRODUCT_S = 90.0  # the first kernel on each GPU loads libraries, perhaps from a network file system
COMPILED_S = 120.0  # Triton first compiles its own launcher in C
LIMIT_S = 900.0  # for all parts together, with the import of torch from a network file system that is not cached
# Gloo uses the loopback interface; without this variable, it would resolve the name of the host. NCCL exchanges only the
# addresses of its ranks over loopback; it chooses the data path between GPUs itself.
ENVIRONMENT = ("OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME=lo")


class Trial(msgspec.Struct, frozen=True):
    """The results of all checks of torch on one node."""

    torch: Torch
    all_reduce: CommandOutput | None = None  # None: torch cannot be imported, or has no backend
    product: CommandOutput | None = None  # the matrix product on each GPU; None: as for all_reduce, or torch sees no GPU
    compiled: CommandOutput | None = None  # torch.compile on the first GPU; None: as for product


def command(python: str) -> list[str]:
    """The command that runs the checks of torch on a node. python: the interpreter of the node."""
    return ["env", *ENVIRONMENT, python, "-m", "provision.checks._trial"]


def parse(stdout: str) -> Trial:
    """The trial that the command printed as JSON. Raises ValueError."""
    return decode(stdout, Trial)


TRIAL = Fact("trial", command, parse, timeout_s=LIMIT_S)


def of(target: Target) -> Trial:
    """The trial of a node. Also stores its part about torch as the answer to the fact TORCH. Raises Unanswered."""
    trial = target.facts[TRIAL]
    target.facts.answers.setdefault(TORCH.name, trial.torch)
    return trial
