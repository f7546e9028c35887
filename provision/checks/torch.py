"""Checks that torch can be imported, supports distributed training, and is of a release that shardlab was tried with."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from provision.check import Check, Outcome
from provision.checks import trial
from provision.facts.torch import Torch
from provision.operation import Site, Target
from shardlab import extras

OLDEST, NEWEST = (2, 11), (2, 14)  # the releases that shardlab was tried with; the range of pyproject.toml is the same
TRIED = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if torch can be imported on this node and has a backend."""
    return judge(trial.of(target).torch, here=target.entry is None)


def judge(torch: Torch, *, here: bool = False) -> Outcome:
    """Returns a passed Outcome if torch can be imported, is not too old, and has a backend with which ranks communicate.

    here: whether the node is this machine, for which the advice is a command.
    """
    if torch.version is None:
        return Outcome(False, f"torch cannot be imported ({torch.why_absent})", _advice(here=here))
    if (release := _release(torch.version)) is not None and release < OLDEST:
        says = f"torch {torch.version} is too old: shardlab was tried with torch {TRIED}"
        return Outcome(False, says, _advice("--upgrade", here=here))
    if not torch.backends:
        says = f"torch {torch.version} is built without distributed training"
        return Outcome(False, says, _advice("--force-reinstall", here=here))
    return Outcome(True, f"torch {torch.version} can be imported; backends: {', '.join(torch.backends)}{remark(torch.version)}")


def _advice(*options: str, here: bool) -> str:
    if here:
        return f"install an official build: {extras.install_command('trainers', *options)}"
    return "install an official build of torch into the environment of the node, which the cluster file or `provision` chose"


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
