"""Names: each node is called as the cluster file calls it, and all know one another on the network that they train over."""

from __future__ import annotations

from provision.facts.files import FILES
from provision.facts.system import SYSTEM
from provision.operations import Change, Nothing, Operation, Run, Site, Target, Write

PATH = "/etc/hosts"


def content(site: Site) -> bytes:
    """No line for 127.0.1.1: a node that takes its own name for loopback tells the others to meet it there."""
    lines = ["# Written by shardlab's provision.", "127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{target.node.host} {target.node.name}" for target in site.targets]
    return "".join(f"{line}\n" for line in lines).encode()


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Raises Unanswered."""
    changes: list[Change] = []
    name = target.node.name
    if target.facts[SYSTEM].hostname != name:
        changes.append(
            Run(f"call it {name} (it is {target.facts[SYSTEM].hostname})", ["hostnamectl", "set-hostname", "--", name])
        )
    wanted = content(site)
    found = target.facts[FILES].get(PATH)
    if found is None or not found.holds(wanted):
        changes.append(Write(f"write the names of all {len(site.targets)} nodes into {PATH}", PATH, wanted))
    return changes or Nothing("all nodes are known by name")


HOSTS = Operation("hosts", plan)
