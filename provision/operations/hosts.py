"""Sets the hostname of each node, and writes the names and addresses of all nodes into /etc/hosts."""

from __future__ import annotations

from provision.facts.files import FILES
from provision.facts.system import SYSTEM
from provision.operation import Change, Nothing, Operation, RunCommand, Site, Target, Write
from provision.operations.existing_slurm import find_existing_slurm

HOSTS_PATH = "/etc/hosts"


def render_hosts(site: Site) -> bytes:
    """The content of /etc/hosts, without 127.0.1.1: otherwise a node would tell the other nodes this loopback address."""
    host_lines = ["# Written by shardlab's provision.", "127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    host_lines += [f"{target.node.address} {target.node.name}" for target in site.targets]
    return "".join(f"{line}\n" for line in host_lines).encode()


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Set the hostname, and write /etc/hosts if it differs. Raises Unanswered."""
    if find_existing_slurm(site) is not None:
        return Nothing("names stay as the Slurm that is there uses them")
    if not target.node.may_sudo and site.cluster.slurm is None:
        return Nothing("names stay as they are: runs use the addresses of the nodes")
    changes: list[Change] = []
    name = target.node.name
    if target.facts[SYSTEM].hostname != name:
        changes.append(
            RunCommand(
                f"set the hostname {name} (now {target.facts[SYSTEM].hostname})", ["hostnamectl", "set-hostname", "--", name]
            )
        )
    hosts_content = render_hosts(site)
    hosts_file = target.facts[FILES].get(HOSTS_PATH)
    if hosts_file is None or not hosts_file.holds(hosts_content):
        changes.append(Write(f"write the names of all {len(site.targets)} nodes into {HOSTS_PATH}", HOSTS_PATH, hosts_content))
    return changes or Nothing("all nodes are known by name")


HOSTS = Operation("hosts", plan, written_paths=(HOSTS_PATH,))
