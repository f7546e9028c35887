"""Writes the compute nodes of a Slurm site, as proof jobs observed them, into the inventory of the workspace."""

from __future__ import annotations

import msgspec

from provision import inventory_file
from provision.checks.node_proof import NodeProof
from provision.facts.node_types import NodeType
from provision.operation import Site
from shardlab.files import files
from shardlab.workspace.inventory import path_of


def record(site: Site, types: list[tuple[NodeType, list[NodeProof]]]) -> None:
    """Write the proven node types into the inventory; do nothing if there is no inventory yet. Raises WorkspaceError.

    types: each node type with the results of its nodes.
    """
    written = inventory_file.read(site.workspace)
    if written is None:
        return
    entries = [
        {
            **{key: value for key, value in msgspec.to_builtins(kind).items() if key != "names"},
            "nodes": [{"facts": inventory_file.facts(proof.host), "rdma": msgspec.to_builtins(proof.rdma)} for proof in proofs],
        }
        for kind, proofs in types
    ]
    content = inventory_file.encoded({**msgspec.json.decode(written), "node_types": entries})
    if content != written:
        files.write_atomic(path_of(site.workspace), content)
