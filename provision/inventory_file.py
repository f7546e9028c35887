"""Reads and encodes the inventory, the file WORKSPACE/.shardlab/inventory.json. An operation writes the nodes into it; checks
add the compute nodes of a Slurm site and the times of all-reduces."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from shardlab.cluster.all_reduce import MeasuredAllReduce
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.hardware.host import Host
from shardlab.workspace.inventory import path_of
from shardlab.workspace.workspace import Workspace

# Facts that are not written into the inventory, because they differ between boots or shells. Otherwise, each `provision` would
# find a change.
VOLATILE = ("boot_id", "cpus_allowed")


def read(workspace: Workspace) -> bytes | None:
    """The bytes of the inventory; None if the workspace has no inventory. Raises WorkspaceError."""
    with files.as_workspace_error("read"):
        try:
            return files.read(path_of(workspace))
        except FileNotFoundError:
            return None


def encoded(inventory: dict[str, Any]) -> bytes:
    """Encode an inventory as the bytes of the file, which are indented JSON."""
    return msgspec.json.format(msgspec.json.encode(inventory), indent=2) + b"\n"


def decoded(written: bytes | None) -> dict[str, Any]:
    """Decode the bytes of an inventory. Returns an empty dictionary if `written` is None or damaged."""
    try:
        return msgspec.json.decode(written or b"{}", type=dict[str, Any])
    except DECODE_FAULTS:
        return {}


def node_types(written: bytes | None) -> list[Any] | None:
    """The node types in the bytes of an inventory; None if it has no node types."""
    known = decoded(written).get("node_types")
    return known if isinstance(known, list) else None


def all_reduces(written: bytes | None) -> list[MeasuredAllReduce]:
    """The measured all-reduces in the bytes of an inventory. All-reduces that are damaged, or that another version of shardlab
    wrote in another form, are left out."""
    known = decoded(written).get("all_reduces")
    found = []
    for entry in known if isinstance(known, list) else []:
        with contextlib.suppress(msgspec.ValidationError):
            found.append(msgspec.convert(entry, MeasuredAllReduce))
    return found


def facts(host: Host) -> dict[str, Any]:
    """The facts about a machine that the inventory contains, by name."""
    return {key: value for key, value in msgspec.to_builtins(host).items() if key not in VOLATILE}
