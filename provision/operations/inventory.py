"""Writes the inventory of the cluster's nodes, so that `jobs` can plan runs for them without asking the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from provision import inventory_file
from provision.cloudlab import experiment_interfaces
from provision.facts.addresses import ADDRESSES
from provision.facts.environment import ENVIRONMENT
from provision.facts.host import HOST
from provision.operation import Change, Here, Nothing, Operation, Site, Target
from provision.operations.existing_slurm import existing
from shardlab.cluster import lease
from shardlab.cluster.lease import Lease
from shardlab.files import files
from shardlab.workspace.inventory import path_of

SCHEMA = 1


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Write WORKSPACE/.shardlab/inventory.json if it differs from the nodes' facts. Raises Unanswered."""
    path = path_of(site.workspace)
    written = inventory_file.read(site.workspace)
    if absent := site.absent():
        why = f"not changed: the inventory describes all nodes, and {', '.join(absent)} cannot be asked"
        alone = _lease_alone(site, written)
        return [*alone] if alone else Nothing(why)
    if site.cluster.provider != "local" and any(one.facts[ENVIRONMENT].source is None for one in site.targets):
        return Nothing("written later: all nodes need the Python environment, which reports their facts")
    content = render(site, inventory_file.node_types(written), inventory_file.of_present_nodes(site, written))
    if written == content:
        return Nothing(f"{path} is up to date")
    what = "write" if written is None else "rewrite"
    return [Here(f"{what} {path} ({len(content)} bytes)", lambda: _write(path, content))]


def _lease_alone(site: Site, written: bytes | None) -> list[Here] | None:
    """The change that writes only the lease into the inventory, for the case that a node of the cluster does not answer.

    `jobs` needs the new end of the lease in this case, too. None if the inventory has this lease already, or describes another
    cluster.
    """
    now = lease_of(site)
    known = inventory_file.decoded(written)
    if now is None or known.get("cluster") != site.cluster.name or known.get("lease") == msgspec.to_builtins(now):
        return None
    content = inventory_file.encoded({**known, "lease": now})
    path = path_of(site.workspace)
    return [Here(f"write the lease into {path}", lambda: _write(path, content))]


def keep_lease(site: Site) -> None:
    """Write the last known lease into the inventory, if the inventory describes this cluster. Raises ShardlabError."""
    for change in _lease_alone(site, inventory_file.read(site.workspace)) or []:
        change.do()


def lease_of(site: Site) -> Lease | None:
    """The last known lease of the cluster's machines; None if they are not lent. Raises InputError."""
    described = site.cluster.cloudlab
    return lease.newest(site.workspace.own, [Path(name) for name in described.manifests]) if described is not None else None


def _write(path: Path, content: bytes) -> None:
    files.make_folder(path.parent)
    files.write_atomic(path, content)


def render(site: Site, node_types: list[Any] | None = None, all_reduces: Sequence[Any] = ()) -> bytes:
    """The inventory of all nodes as indented JSON.

    node_types: the compute nodes of a Slurm site, as checks found them. all_reduces: the all-reduces that checks measured.
    """
    inventory: dict[str, Any] = {
        "schema": SCHEMA,
        "cluster": site.cluster.name,
        "provider": site.cluster.provider,
        "nodes": [_entry(target, site.cluster.provider) for target in site.targets],
        **({"node_types": node_types} if node_types is not None else {}),
    }
    if (lent := lease_of(site)) is not None:
        inventory["lease"] = lent
    if (there := existing(site)) is not None:
        assert site.cluster.slurm is not None
        inventory["slurm"] = {
            "cluster": there.cluster,
            "version": there.version,
            "conf": there.conf,
            "partition": site.cluster.slurm.partition,
            "installed_by_shardlab": False,
        }
    if all_reduces:
        inventory["all_reduces"] = all_reduces
    return inventory_file.encoded(inventory)


def _entry(target: Target, provider: str) -> dict[str, Any]:
    node = target.node
    facts = inventory_file.facts(target.facts[HOST])
    addresses = target.facts[ADDRESSES]
    networks = experiment_interfaces.of(target)
    # Virtual interfaces without an address are left out: they belong to containers, and appear and disappear with them.
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
