"""Checks that torch can be imported, supports distributed training, and is of a release that shardlab was tried with."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from provision.check import Check, Outcome
from provision.checks import trial
from provision.facts.torch import Torch
from provision.operation import Site, Target
from shardlab import extras

# the releases that shardlab was tried with; the range of pyproject.toml is the same
OLDEST_TRIED, NEWEST_TRIED = ((2, 11), (2, 14))
TRIED_RELEASES = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST_TRIED, NEWEST_TRIED))


def run(site: Site, target: Target) -> Outcome:
    """Returns a passed Outcome if torch can be imported on this node and has a backend."""
    return judge_torch(trial.run_trial(target).torch, is_this_machine=target.node_entry is None)


def judge_torch(torch: Torch, *, is_this_machine: bool = False) -> Outcome:
    """Returns a passed Outcome if torch can be imported, is not too old, and has a backend with which ranks communicate.

    is_this_machine: whether the node is this machine, for which the advice is a command.
    """
    if torch.version is None:
        return Outcome(False, f"torch cannot be imported ({torch.why_absent})", _advise_pip(is_this_machine=is_this_machine))
    if (major_minor := _parse_release(torch.version)) is not None and major_minor < OLDEST_TRIED:
        sentence = f"torch {torch.version} is too old: shardlab was tried with torch {TRIED_RELEASES}"
        return Outcome(False, sentence, _advise_pip("--upgrade", is_this_machine=is_this_machine))
    if not torch.backends:
        sentence = f"torch {torch.version} is built without distributed training"
        return Outcome(False, sentence, _advise_pip("--force-reinstall", is_this_machine=is_this_machine))
    backend_names = ", ".join(torch.backends)
    return Outcome(
        True, f"torch {torch.version} can be imported; backends: {backend_names}{describe_untried_release(torch.version)}"
    )


def _advise_pip(*options: str, is_this_machine: bool) -> str:
    if is_this_machine:
        return f"install an official build: {extras.make_install_command('trainers', *options)}"
    return "install an official build of torch into the environment of the node, which the cluster file or `provision` chose"


def describe_untried_release(torch_version: str) -> str:
    """The end of a sentence about a torch that is newer than those that shardlab was tried with; '' for another torch."""
    release = _parse_release(torch_version)
    return f"; shardlab was tried with torch {TRIED_RELEASES} only" if release is not None and release > NEWEST_TRIED else ""


def _parse_release(torch_version: str) -> tuple[int, ...] | None:
    """The first two numbers of a version, such as (2, 11) of 2.11.0a0+nv25.10; None if it is no version."""
    try:
        return Version(torch_version).release[:2]
    except InvalidVersion:
        return None


TORCH_IMPORTS = Check("torch", run)
