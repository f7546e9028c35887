"""The folder of the workspaces on each node, if runs start over SSH on nodes that share no folder."""

from __future__ import annotations

from provision.facts.mounts import place
from provision.facts.system import SYSTEM
from provision.operation import Change, Nothing, Operation, RunCommand, Site, Target
from provision.operations import fstab


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Make the folder, which belongs to the user who logs in: the first node sends its runs there. Raises Unanswered."""
    if not site.cluster.has_separate_folders:
        return Nothing("the nodes share a folder, or Slurm starts the runs")
    folder = str(site.cluster.workspaces)
    if target.facts[place(folder)].there:
        return Nothing(f"{folder} exists")
    make = RunCommand(f"make the folder {folder}", ["install", "-d", "-o", target.facts[SYSTEM].user, "--", folder])
    return [*fstab.guard(site, target, folder), make]


WORKSPACES = Operation("workspaces", plan)
