"""Writes the compute nodes of a Slurm site, as proof jobs observed them, into the inventory of the workspace."""

from __future__ import annotations

import msgspec

from provision import inventory_file
from provision.checks.node_proof import NodeProof
from provision.facts.node_types import NodeType
from provision.operation import Site
from shardlab.files import files
from shardlab.workspace.inventory import inventory_path


def record_proven_nodes(site: Site, proofs_by_type: list[tuple[NodeType, list[NodeProof]]]) -> None:
    """Write the proven node types into the inventory; do nothing if there is no inventory yet. Raises WorkspaceError.

    proofs_by_type: each node type with the results of its nodes.
    """
    old_content = inventory_file.read_inventory(site.workspace)
    if old_content is None:
        return
    inventory_entries = [
        {
            **{key: value for key, value in msgspec.to_builtins(node_type).items() if key != "names"},
            "nodes": [
                {"facts": inventory_file.select_stable_facts(proof.host), "rdma": msgspec.to_builtins(proof.rdma)}
                for proof in proofs
            ],
        }
        for node_type, proofs in proofs_by_type
    ]
    inventory_bytes = inventory_file.encode_inventory({**msgspec.json.decode(old_content), "node_types": inventory_entries})
    if inventory_bytes != old_content:
        files.write_atomic(inventory_path(site.workspace), inventory_bytes)
