"""The results of a trial of torch on a node. All checks of torch use one trial, because it takes seconds to import torch."""

from __future__ import annotations

import msgspec

from provision.fact import FactQuery, decode_last_line
from provision.facts.torch import TORCH, Torch
from provision.operation import Target
from shardlab.remote.remote import CommandOutput

TRIAL_RANKS = 2
INSPECT_S = 180.0
RANKS_S = 195.0  # the time limit of the all-reduce; the ranks themselves stop waiting for one another after 180 s
PRODUCT_S = 90.0  # the time limit of the matrix product; the first kernel on a GPU may load libraries over a network
COMPILED_S = 120.0  # the time limit of torch.compile; Triton first compiles its own launcher in C
LIMIT_S = 900.0  # the time limit of all parts together, with the import of torch from a network file system
# Gloo and NCCL use the loopback interface. Without GLOO_SOCKET_IFNAME, Gloo would resolve the name of the host to find an
# interface. NCCL exchanges only the addresses of its ranks over loopback, and chooses the data path between GPUs itself.
TRIAL_VARIABLES = ("OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME=lo")


class Trial(msgspec.Struct, frozen=True):
    """The results of a trial of torch on one node: its properties, and the output of each test program."""

    torch: Torch
    all_reduce: CommandOutput | None = None
    """The all-reduce; None: torch cannot be imported, or has no backend."""
    product: CommandOutput | None = None
    """The matrix product on each GPU; None: torch cannot be used, or sees no GPU."""
    compiled: CommandOutput | None = None
    """torch.compile on the first GPU; None: torch cannot be used, or sees no GPU."""


def command(python: str) -> list[str]:
    """The command that runs the checks of torch on a node. python: the interpreter of the node."""
    return ["env", *TRIAL_VARIABLES, python, "-m", "provision.checks._trial"]


def parse(stdout: str) -> Trial:
    """The trial that the command printed as JSON. Raises ValueError."""
    return decode_last_line(stdout, Trial)


TRIAL = FactQuery("trial", command, parse, timeout_s=LIMIT_S)


def run_trial(target: Target) -> Trial:
    """The trial of a node. Also stores the properties of torch as the answer to the fact TORCH. Raises Unanswered."""
    trial = target.facts[TRIAL]
    target.facts.answers.setdefault(TORCH.name, trial.torch)
    return trial
