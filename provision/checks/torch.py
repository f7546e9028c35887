"""Checks that torch can be imported and supports distributed training."""

from __future__ import annotations

from provision.check import Check, Outcome
from provision.checks import trial
from provision.facts.torch import Torch
from provision.operation import Site, Target


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if torch can be imported on this node and has a backend."""
    return judge(trial.of(target).torch)


def judge(torch: Torch) -> Outcome:
    """Returns a passed Outcome if torch can be imported and has a backend with which ranks communicate."""
    if torch.version is None:
        return Outcome(False, f"torch cannot be imported ({torch.why_absent})", "install it: pip install 'shardlab[trainers]'")
    if not torch.backends:
        says = f"torch {torch.version} is built without distributed training"
        return Outcome(False, says, "install an official build: pip install --force-reinstall 'shardlab[trainers]'")
    return Outcome(True, f"torch {torch.version} can be imported; backends: {', '.join(torch.backends)}")


TORCH_IMPORTS = Check("torch", run)
