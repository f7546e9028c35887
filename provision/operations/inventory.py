"""Writes the inventory of the cluster's nodes, so that `jobs` can plan runs for them without asking the nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from provision.checks.node_proof import NodeProof
from provision.facts.addresses import ADDRESSES
from provision.facts.environment import ENVIRONMENT
from provision.facts.host import HOST
from provision.facts.node_types import NodeType
from provision.operation import Change, Here, Nothing, Operation, Site, Target
from shardlab import files
from shardlab.decoders import DECODE_FAULTS
from shardlab.host import Host

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
    written = _read(path)
    content = render(site, _node_types(written))
    if written == content:
        return Nothing(f"{path} is up to date")
    what = "write" if written is None else "rewrite"

    def make() -> None:
        files.make_folder(path.parent)
        files.write_atomic(path, content)

    return [Here(f"{what} {path} ({len(content)} bytes)", make)]


def render(site: Site, node_types: list[Any] | None = None) -> bytes:
    """The inventory of all nodes as indented JSON. node_types: of the compute nodes of a Slurm site, as `record` wrote them."""
    inventory = {
        "schema": SCHEMA,
        "cluster": site.cluster.name,
        "provider": site.cluster.provider,
        "nodes": [_entry(target, site.cluster.provider) for target in site.targets],
        **({"node_types": node_types} if node_types is not None else {}),
    }
    return _encoded(inventory)


def record(site: Site, types: list[tuple[NodeType, list[NodeProof]]]) -> None:
    """Write the compute nodes of a Slurm site into the inventory, as jobs on them found them. Raises WorkspaceError."""
    path = site.workspace.own / "inventory.json"
    written = _read(path)
    if written is None:
        return
    entries = [
        {
            **{key: value for key, value in msgspec.to_builtins(kind).items() if key != "names"},
            "nodes": [{"facts": _facts(proof.host), "rdma": msgspec.to_builtins(proof.rdma)} for proof in proofs],
        }
        for kind, proofs in types
    ]
    content = _encoded({**msgspec.json.decode(written), "node_types": entries})
    if content != written:
        files.write_atomic(path, content)


def _encoded(inventory: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(inventory), indent=2) + b"\n"


def _node_types(written: bytes | None) -> list[Any] | None:
    """The node types of an inventory; None if it has none."""
    try:
        known = msgspec.json.decode(written or b"{}", type=dict[str, Any]).get("node_types")
    except DECODE_FAULTS:
        return None
    return known if isinstance(known, list) else None


def _facts(host: Host) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(host).items() if key not in VOLATILE}


def _entry(target: Target, provider: str) -> dict[str, Any]:
    node = target.node
    addresses = target.facts[ADDRESSES]
    facts = _facts(target.facts[HOST])
    # Containers come and go with virtual interfaces of their own, which have no address on this side.
    facts["nics"] = [nic for nic in facts["nics"] if nic["kind"] == "physical" or nic["name"] in addresses]
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
