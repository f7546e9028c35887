"""Training needs a torch that imports."""

from __future__ import annotations

from provision.checks import Check, Outcome, trial
from provision.facts.torch import Torch
from provision.operations import Site, Target


def run(site: Site, target: Target) -> Outcome:
    return judge(trial.of(target).torch)


def judge(torch: Torch) -> Outcome:
    """Passed where torch imports and its ranks can talk to one another."""
    if torch.version is None:
        return Outcome(False, f"torch does not import ({torch.why_absent})", "install it: pip install 'shardlab[trainers]'")
    if not torch.backends:
        says = f"torch {torch.version} is built without distributed training"
        return Outcome(False, says, "install an official build: pip install --force-reinstall 'shardlab[trainers]'")
    return Outcome(True, f"torch {torch.version} imports; backends: {', '.join(torch.backends)}")


TORCH_IMPORTS = Check("torch", run)
