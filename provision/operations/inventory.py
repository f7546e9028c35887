"""Writes the inventory of the cluster's nodes, so that `jobs` can plan runs for them without asking the nodes."""

from __future__ import annotations

from typing import Any

import msgspec

from provision import experiment_interfaces, inventory_file
from provision.existing_slurm import existing
from provision.facts.addresses import ADDRESSES
from provision.facts.environment import ENVIRONMENT
from provision.facts.host import HOST
from provision.operation import Change, Here, Nothing, Operation, Site, Target
from shardlab import files
from shardlab.inventory import path_of

SCHEMA = 1


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Write WORKSPACE/.shardlab/inventory.json if it differs from the nodes' facts. Raises Unanswered."""
    path = path_of(site.workspace)
    if absent := site.absent():
        return Nothing(f"not changed: the inventory describes all nodes, and {', '.join(absent)} cannot be asked")
    if site.cluster.provider != "local" and any(one.facts[ENVIRONMENT].source is None for one in site.targets):
        return Nothing("written later: all nodes need the Python environment, which reports their facts")
    written = inventory_file.read(site.workspace)
    content = render(site, inventory_file.node_types(written))
    if written == content:
        return Nothing(f"{path} is up to date")
    what = "write" if written is None else "rewrite"

    def make() -> None:
        files.make_folder(path.parent)
        files.write_atomic(path, content)

    return [Here(f"{what} {path} ({len(content)} bytes)", make)]


def render(site: Site, node_types: list[Any] | None = None) -> bytes:
    """The inventory of all nodes as indented JSON. node_types: the compute nodes of a Slurm site, which a check found."""
    inventory: dict[str, Any] = {
        "schema": SCHEMA,
        "cluster": site.cluster.name,
        "provider": site.cluster.provider,
        "nodes": [_entry(target, site.cluster.provider) for target in site.targets],
        **({"node_types": node_types} if node_types is not None else {}),
    }
    if (there := existing(site)) is not None:
        assert site.cluster.slurm is not None
        inventory["slurm"] = {
            "cluster": there.cluster,
            "version": there.version,
            "conf": there.conf,
            "partition": site.cluster.slurm.partition,
            "installed_by_shardlab": False,
        }
    return inventory_file.encoded(inventory)


def _entry(target: Target, provider: str) -> dict[str, Any]:
    node = target.node
    facts = inventory_file.facts(target.facts[HOST])
    addresses = target.facts[ADDRESSES]
    networks = experiment_interfaces.of(target)
    # Containers come and go with virtual interfaces of their own, which have no address on this side.
    facts["nics"] = [nic for nic in facts["nics"] if nic["kind"] == "physical" or nic["name"] in addresses]
    return {
        "name": node.name,
        "host": node.host,
        "address": node.address,
        "port": node.port,
        "user": node.user,
        "identity": str(node.identity) if node.identity is not None else None,
        "python": node.python,
        "roles": target.entry.roles if target.entry is not None else ["controller"] if provider == "slurm" else [],
        "addresses": addresses,
        **({"networks": msgspec.to_builtins(networks)} if networks is not None else {}),
        "facts": facts,
    }


INVENTORY = Operation("inventory", plan, once=True)
