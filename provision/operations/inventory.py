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
from provision.operation import Change, LocalCall, Nothing, Operation, Site, Target
from provision.operations.existing_slurm import find_existing_slurm
from shardlab.cluster import lease
from shardlab.cluster.lease import Lease
from shardlab.files import files
from shardlab.workspace.inventory import ProvisionedEnvironment, inventory_path

SCHEMA = 1


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Write WORKSPACE/.shardlab/inventory.json if it differs from the nodes' facts. Raises Unanswered."""
    path = inventory_path(site.workspace)
    old_text = inventory_file.read_inventory(site.workspace)
    if absent_names := site.list_absent_names():
        absent_reason = f"not changed: the inventory describes all nodes, and {', '.join(absent_names)} cannot be asked"
        lease_changes = _plan_lease_only(site, old_text)
        return [*lease_changes] if lease_changes else Nothing(absent_reason)
    if site.cluster.provider != "local" and any(member.facts[ENVIRONMENT].source is None for member in site.targets):
        return Nothing("written later: all nodes need the Python environment, which reports their facts")
    text = render_inventory(site, inventory_file.parse_node_types(old_text), inventory_file.select_measurements(site, old_text))
    if old_text == text:
        return Nothing(f"{path} is up to date")
    write_verb = "write" if old_text is None else "rewrite"
    return [LocalCall(f"{write_verb} {path} ({len(text)} bytes)", lambda: _write_inventory(path, text))]


def _plan_lease_only(site: Site, old_inventory_bytes: bytes | None) -> list[LocalCall] | None:
    """The change that writes only the lease into the inventory, for the case that a node of the cluster does not answer.

    `jobs` needs the new end of the lease in this case, too. None if the inventory has this lease already, or describes another
    cluster.
    """
    latest = find_lease(site)
    inventory = inventory_file.decode_inventory(old_inventory_bytes)
    if latest is None or inventory.get("cluster") != site.cluster.name or inventory.get("lease") == msgspec.to_builtins(latest):
        return None
    inventory_bytes = inventory_file.encode_inventory({**inventory, "lease": latest})
    path = inventory_path(site.workspace)
    return [LocalCall(f"write the lease into {path}", lambda: _write_inventory(path, inventory_bytes))]


def store_lease(site: Site) -> None:
    """Write the last known lease into the inventory, if the inventory describes this cluster. Raises ShardlabError."""
    for change in _plan_lease_only(site, inventory_file.read_inventory(site.workspace)) or []:
        change.call()


def find_lease(site: Site) -> Lease | None:
    """The last known lease of the cluster's machines; None if they are not lent. Raises InputError."""
    cloudlab_keys = site.cluster.cloudlab
    if cloudlab_keys is None:
        return None
    return lease.read_newest_lease(site.workspace.shardlab_folder, [Path(file_name) for file_name in cloudlab_keys.manifests])


def _write_inventory(inventory_path: Path, inventory_bytes: bytes) -> None:
    files.make_folder(inventory_path.parent)
    files.write_atomic(inventory_path, inventory_bytes)


def render_inventory(site: Site, node_types: list[Any] | None = None, all_reduces: Sequence[Any] = ()) -> bytes:
    """The inventory of all nodes as indented JSON.

    node_types: the compute nodes of a Slurm site, as checks found them. all_reduces: the all-reduces that checks measured.
    """
    inventory: dict[str, Any] = {
        "schema": SCHEMA,
        "cluster": site.cluster.name,
        "provider": site.cluster.provider,
        "nodes": [_make_node_entry(target, site.cluster.provider) for target in site.targets],
        **({"node_types": node_types} if node_types is not None else {}),
        **({"environments": environments} if (environments := _list_environments(site)) else {}),
    }
    if (cluster_lease := find_lease(site)) is not None:
        inventory["lease"] = cluster_lease
    if (existing_slurm := find_existing_slurm(site)) is not None:
        assert site.cluster.slurm is not None
        inventory["slurm"] = {
            "cluster": existing_slurm.cluster,
            "version": existing_slurm.version,
            "conf": existing_slurm.conf,
            "partition": site.cluster.slurm.partition,
            "installed_by_shardlab": False,
        }
    if all_reduces:
        inventory["all_reduces"] = all_reduces
    return inventory_file.encode_inventory(inventory)


def _list_environments(site: Site) -> dict[str, ProvisionedEnvironment]:
    """The further environments of the cluster file that exist on all nodes, by name. Raises Unanswered."""
    environments = {}
    for environment_name, environment_keys in site.cluster.environments.items():
        targets = [target.environments[environment_name] for target in site.targets]
        installed_environments = [target.facts[ENVIRONMENT] for target in targets]
        is_local = site.cluster.provider == "local"  # the user makes the environments of this machine
        if all(entry.version is not None and (is_local or entry.source is not None) for entry in installed_environments):
            python_path, first_environment = targets[0].node.python, installed_environments[0]
            environments[environment_name] = ProvisionedEnvironment(
                python_path,
                environment_keys.compute_digest(),
                first_environment.version or "",
                first_environment.packages,
                first_environment.source,
            )
    return environments


def _make_node_entry(target: Target, provider: str) -> dict[str, Any]:
    node = target.node
    node_facts = inventory_file.select_stable_facts(target.facts[HOST])
    addresses = target.facts[ADDRESSES]
    node_interfaces = experiment_interfaces.find_node_interfaces(target)
    # Virtual interfaces without an address are left out: they belong to containers, and appear and disappear with them.
    node_facts["nics"] = [nic for nic in node_facts["nics"] if nic["kind"] == "physical" or nic["name"] in addresses]
    return {
        "name": node.name,
        "host": node.host,
        "address": node.address,
        "port": node.port,
        "user": node.user,
        "identity": str(node.identity) if node.identity is not None else None,
        "python": node.python,
        "roles": target.node_entry.roles if target.node_entry is not None else ["controller"] if provider == "slurm" else [],
        "addresses": addresses,
        **({"networks": msgspec.to_builtins(node_interfaces)} if node_interfaces is not None else {}),
        "facts": node_facts,
    }


INVENTORY = Operation("inventory", plan, once=True)
