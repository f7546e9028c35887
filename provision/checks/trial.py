"""The results of torch's checks on a node, made once for all checks that need them: importing torch takes seconds."""

from __future__ import annotations

import msgspec

from provision.fact import Fact, decode
from provision.facts.torch import TORCH, Torch
from provision.operation import Target
from shardlab.remote import CommandOutput

RANKS = 2
LOOK_S = 180.0
RANKS_S = 195.0  # the ranks themselves give up waiting for one another after 180 s
PRODUCT_S = 90.0  # the first kernel of each GPU loads libraries, from a network folder perhaps
COMPILED_S = 120.0  # Triton first compiles its own launcher in C
LIMIT_S = 900.0  # all of it, and an import from a cold network folder
# Loopback for Gloo, which would otherwise resolve the host's name; NCCL finds its own way between GPUs.
ENVIRONMENT = ("OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME=lo")


class Trial(msgspec.Struct, frozen=True):
    """all_reduce: None if torch cannot be imported. product, compiled: of the GPUs; None also if torch sees no GPU."""

    torch: Torch
    all_reduce: CommandOutput | None = None
    product: CommandOutput | None = None
    compiled: CommandOutput | None = None


def command(python: str) -> list[str]:
    """The program that makes the trial on a node."""
    return ["env", *ENVIRONMENT, python, "-m", "provision.checks._trial"]


def parse(stdout: str) -> Trial:
    """Raises ValueError."""
    return decode(stdout, Trial)


TRIAL = Fact("trial", command, parse, timeout_s=LIMIT_S)


def of(target: Target) -> Trial:
    """The trial of a node, which also answers the fact TORCH. Raises Unanswered."""
    trial = target.facts[TRIAL]
    target.facts.answers.setdefault(TORCH.name, trial.torch)
    return trial
