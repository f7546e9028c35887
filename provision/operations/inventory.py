"""Writes the inventory of the cluster's nodes, so that `jobs` can plan runs for them without asking the nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from provision.existing_slurm import existing
from provision.facts.addresses import ADDRESSES
from provision.facts.environment import ENVIRONMENT
from provision.facts.host import HOST
from provision.operation import Change, Here, Nothing, Operation, Site, Target
from shardlab import files

SCHEMA = 1

# Left out, because they differ between boots or shells: otherwise each `provision` would find a change.
VOLATILE = ("boot_id", "cpus_allowed")


def plan(site: Site, target: Target) -> list[Change] | Nothing:
    """Write WORKSPACE/.shardlab/inventory.json if it differs from the nodes' facts. Raises Unanswered."""
    path = site.workspace.own / "inventory.json"
    if absent := site.absent():
        return Nothing(f"not changed: the inventory describes all nodes, and {', '.join(absent)} cannot be asked")
    if site.cluster.provider != "local" and any(one.facts[ENVIRONMENT].source is None for one in site.targets):
        return Nothing("written later: all nodes need the Python environment, which reports their facts")
    content = render(site)
    written = _read(path)
    if written == content:
        return Nothing(f"{path} is up to date")
    what = "write" if written is None else "rewrite"

    def make() -> None:
        files.make_folder(path.parent)
        files.write_atomic(path, content)

    return [Here(f"{what} {path} ({len(content)} bytes)", make)]


def render(site: Site) -> bytes:
    """The inventory of all nodes as indented JSON."""
    inventory: dict[str, Any] = {
        "schema": SCHEMA,
        "cluster": site.cluster.name,
        "provider": site.cluster.provider,
        "nodes": [_entry(target, site.cluster.provider) for target in site.targets],
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
    return msgspec.json.format(msgspec.json.encode(inventory), indent=2) + b"\n"


def _entry(target: Target, provider: str) -> dict[str, Any]:
    node = target.node
    host = msgspec.to_builtins(target.facts[HOST])
    addresses = target.facts[ADDRESSES]
    facts = {key: value for key, value in host.items() if key not in VOLATILE}
    # Containers come and go with virtual interfaces of their own, which have no address on this side.
    facts["nics"] = [nic for nic in host["nics"] if nic["kind"] == "physical" or nic["name"] in addresses]
    return {
        "name": node.name,
        "host": node.host,
        "port": node.port,
        "user": node.user,
        "identity": str(node.identity) if node.identity is not None else None,
        "python": node.python,
        "roles": target.entry.roles if target.entry is not None else ["controller"] if provider == "slurm" else [],
        "addresses": addresses,
        "facts": facts,
    }


def _read(path: Path) -> bytes | None:
    with files.as_workspace_error("read"):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


INVENTORY = Operation("inventory", plan, once=True)
