"""Reads and encodes the inventory, the file WORKSPACE/.shardlab/inventory.json. An operation writes the nodes into it; checks
add the compute nodes of a Slurm site and the times of all-reduces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from provision.operation import Site
from provision.verify import Finding
from shardlab.cluster.all_reduce import MeasuredAllReduce
from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.hardware.host import Host
from shardlab.workspace.inventory import inventory_path
from shardlab.workspace.workspace import Workspace

# Facts that are not written into the inventory, because they differ between boots or shells. Otherwise, each `provision` would
# find a change.
VOLATILE_FACTS = ("boot_id", "cpus_allowed")


def read_inventory(workspace: Workspace) -> bytes | None:
    """The bytes of the inventory; None if the workspace has no inventory. Raises WorkspaceError."""
    with files.as_workspace_error("read"):
        try:
            return files.read(inventory_path(workspace))
        except FileNotFoundError:
            return None


def encode_inventory(inventory: dict[str, Any]) -> bytes:
    """Encode an inventory as the bytes of the file, which are indented JSON."""
    return msgspec.json.format(msgspec.json.encode(inventory), indent=2) + b"\n"


def decode_inventory(inventory_bytes: bytes | None) -> dict[str, Any]:
    """Decode the bytes of an inventory. Returns an empty dictionary if `inventory_bytes` is None or damaged."""
    try:
        return msgspec.json.decode(inventory_bytes or b"{}", type=dict[str, Any])
    except DECODE_FAULTS:
        return {}


def parse_node_types(inventory_bytes: bytes | None) -> list[Any] | None:
    """The node types in the bytes of an inventory; None if it has no node types."""
    type_entries = decode_inventory(inventory_bytes).get("node_types")
    return type_entries if isinstance(type_entries, list) else None


def parse_all_reduces(inventory_bytes: bytes | None) -> list[MeasuredAllReduce]:
    """The measured all-reduces in the bytes of an inventory. All-reduces that are damaged, or that another version of shardlab
    wrote in another form, are left out."""
    measurement_entries = decode_inventory(inventory_bytes).get("all_reduces")
    all_reduces = []
    for measurement_entry in measurement_entries if isinstance(measurement_entries, list) else []:
        with contextlib.suppress(msgspec.ValidationError):
            all_reduces.append(msgspec.convert(measurement_entry, MeasuredAllReduce))
    return all_reduces


def select_stable_facts(host: Host) -> dict[str, Any]:
    """The facts about a machine that the inventory contains, by name."""
    return {key: value for key, value in msgspec.to_builtins(host).items() if key not in VOLATILE_FACTS}


def record_all_reduces(site: Site, findings: Sequence[Finding], *, replaces_earlier: bool) -> None:
    """Write the all-reduces that the checks measured into the inventory. Raises WorkspaceError.

    replaces_earlier: whether a new measurement replaces an earlier measurement of the same nodes and backend. If not, the
    earlier measurement stays, so that a command that has nothing to change does not change the inventory. Nothing is written if
    nothing was measured, or if the inventory is missing or describes another cluster."""
    all_reduces = [measurement for finding in findings for measurement in finding.outcome.all_reduces]
    old_content = read_inventory(site.workspace)
    inventory = decode_inventory(old_content)
    if not all_reduces or inventory.get("cluster") != site.cluster.name:
        return
    earlier_all_reduces = parse_all_reduces(old_content)
    all_reduce_by_key = {
        _make_key(measurement): measurement
        for measurement in ([*earlier_all_reduces, *all_reduces] if replaces_earlier else [*all_reduces, *earlier_all_reduces])
    }
    inventory_bytes = encode_inventory({**inventory, "all_reduces": encode_measurements(all_reduce_by_key.values())})
    if inventory_bytes != old_content:
        files.write_atomic(inventory_path(site.workspace), inventory_bytes)


def select_measurements(site: Site, inventory_bytes: bytes | None) -> list[Any]:
    """The measurements in the bytes of an inventory whose nodes still belong to the cluster, as JSON values.

    On a Slurm site, the cluster file does not list the measured nodes, which are compute nodes, so all measurements are kept.
    """
    node_names = {target.node.name for target in site.targets}
    all_reduces = parse_all_reduces(inventory_bytes)
    return encode_measurements(
        measured for measured in all_reduces if site.cluster.provider == "slurm" or node_names.issuperset(measured.nodes)
    )


def encode_measurements(all_reduces: Iterable[MeasuredAllReduce]) -> list[Any]:
    """Convert measurements to JSON values, sorted by the number of nodes and their names, so that equal measurements give equal
    files."""
    values: list[Any] = msgspec.to_builtins(sorted(all_reduces, key=lambda entry: (len(entry.nodes), _make_key(entry))))
    return values


def _make_key(measurement: MeasuredAllReduce) -> tuple[tuple[str, ...], str]:
    return measurement.nodes, measurement.backend
