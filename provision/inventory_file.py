"""The inventory, WORKSPACE/.shardlab/inventory.json. An operation writes the nodes, a check the node types of a Slurm site."""

from __future__ import annotations

from typing import Any

import msgspec

from shardlab import files
from shardlab.decoders import DECODE_FAULTS
from shardlab.host import Host
from shardlab.inventory import path_of
from shardlab.workspace import Workspace

# Facts that the inventory leaves out, because they differ between boots or shells and each `provision` would find a change.
VOLATILE = ("boot_id", "cpus_allowed")


def read(workspace: Workspace) -> bytes | None:
    """The bytes of the inventory file; None if there is no such file. Raises WorkspaceError."""
    with files.as_workspace_error("read"):
        try:
            return path_of(workspace).read_bytes()
        except FileNotFoundError:
            return None


def encoded(inventory: dict[str, Any]) -> bytes:
    """The bytes of the inventory file for this inventory: indented JSON."""
    return msgspec.json.format(msgspec.json.encode(inventory), indent=2) + b"\n"


def decoded(written: bytes | None) -> dict[str, Any]:
    """Decode the bytes of an inventory file. The result is empty if there is no file or if the file is damaged."""
    try:
        return msgspec.json.decode(written or b"{}", type=dict[str, Any])
    except DECODE_FAULTS:
        return {}


def node_types(written: bytes | None) -> list[Any] | None:
    """The node types that the bytes of an inventory file contain; None if they contain none."""
    known = decoded(written).get("node_types")
    return known if isinstance(known, list) else None


def facts(host: Host) -> dict[str, Any]:
    """The facts about a machine that the inventory contains, by name."""
    return {key: value for key, value in msgspec.to_builtins(host).items() if key not in VOLATILE}
