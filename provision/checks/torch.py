"""Checks that torch can be imported, supports distributed training, and is of a release that shardlab was tried with."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from provision.check import Check, Outcome
from provision.checks import trial
from provision.facts.torch import Torch
from provision.operation import Site, Target

OLDEST, NEWEST = (2, 11), (2, 14)  # the releases that shardlab was tried with; the range of pyproject.toml is the same
TRIED = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if torch can be imported on this node and has a backend."""
    return judge(trial.of(target).torch)


def judge(torch: Torch) -> Outcome:
    """Returns a passed Outcome if torch can be imported, is not too old, and has a backend with which ranks communicate."""
    if torch.version is None:
        return Outcome(False, f"torch cannot be imported ({torch.why_absent})", "install it: pip install 'shardlab[trainers]'")
    if (release := _release(torch.version)) is not None and release < OLDEST:
        says = f"torch {torch.version} is too old: shardlab was tried with torch {TRIED}"
        return Outcome(False, says, "install a newer torch: pip install --upgrade 'shardlab[trainers]'")
    if not torch.backends:
        says = f"torch {torch.version} is built without distributed training"
        return Outcome(False, says, "install an official build: pip install --force-reinstall 'shardlab[trainers]'")
    return Outcome(True, f"torch {torch.version} can be imported; backends: {', '.join(torch.backends)}{remark(torch.version)}")


def remark(version: str) -> str:
    """The end of a sentence about a torch that is newer than those that shardlab was tried with; '' for another torch."""
    release = _release(version)
    return f"; shardlab was tried with torch {TRIED} only" if release is not None and release > NEWEST else ""


def _release(version: str) -> tuple[int, ...] | None:
    """The first two numbers of a version, such as (2, 11) of 2.11.0a0+nv25.10; None if it is no version."""
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return None


TORCH_IMPORTS = Check("torch", run)
