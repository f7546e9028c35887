"""The file WORKSPACE/.shardlab/inventory.json. An operation writes the nodes; checks write the compute nodes of a Slurm site,
and the times of all-reduces."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from shardlab import files
from shardlab.all_reduce import MeasuredAllReduce
from shardlab.decoders import DECODE_FAULTS
from shardlab.host import Host
from shardlab.inventory import path_of
from shardlab.workspace import Workspace

# Left out, because they differ between boots or shells: otherwise each `provision` would find a change.
VOLATILE = ("boot_id", "cpus_allowed")


def read(workspace: Workspace) -> bytes | None:
    """Its bytes; None if there is no such file. Raises WorkspaceError."""
    with files.as_workspace_error("read"):
        try:
            return path_of(workspace).read_bytes()
        except FileNotFoundError:
            return None


def encoded(inventory: dict[str, Any]) -> bytes:
    """The bytes of the file: indented JSON."""
    return msgspec.json.format(msgspec.json.encode(inventory), indent=2) + b"\n"


def decoded(written: bytes | None) -> dict[str, Any]:
    """The inventory with these bytes; empty if there is none, or if it is damaged."""
    try:
        return msgspec.json.decode(written or b"{}", type=dict[str, Any])
    except DECODE_FAULTS:
        return {}


def node_types(written: bytes | None) -> list[Any] | None:
    """The node types of an inventory; None if it has none."""
    known = decoded(written).get("node_types")
    return known if isinstance(known, list) else None


def all_reduces(written: bytes | None) -> list[MeasuredAllReduce]:
    """The measured all-reduces of an inventory. Those that another version wrote differently, or that are damaged, are left
    out."""
    known = decoded(written).get("all_reduces")
    found = []
    for entry in known if isinstance(known, list) else []:
        with contextlib.suppress(msgspec.ValidationError):
            found.append(msgspec.convert(entry, MeasuredAllReduce))
    return found


def facts(host: Host) -> dict[str, Any]:
    """What the inventory says of a machine."""
    return {key: value for key, value in msgspec.to_builtins(host).items() if key not in VOLATILE}
