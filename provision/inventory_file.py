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


def record(site: Site, findings: Sequence[Finding], *, again: bool) -> None:
    """Write the all-reduces that the checks measured into the inventory. Raises WorkspaceError.

    again: whether a new measurement replaces an earlier measurement of the same nodes and backend. If not, the earlier
    measurement stays, so that a command that has nothing to change does not change the inventory. Nothing is written if nothing
    was measured, or if the inventory is missing or describes another cluster.
    """
    measured = [one for finding in findings for one in finding.outcome.all_reduces]
    written = read(site.workspace)
    known = decoded(written)
    if not measured or known.get("cluster") != site.cluster.name:
        return
    earlier = all_reduces(written)
    kept = {_key(one): one for one in ([*earlier, *measured] if again else [*measured, *earlier])}
    content = encoded({**known, "all_reduces": encodable(kept.values())})
    if content != written:
        files.write_atomic(path_of(site.workspace), content)


def of_present_nodes(site: Site, written: bytes | None) -> list[Any]:
    """The measurements in the bytes of an inventory whose nodes still belong to the cluster, as JSON values.

    On a Slurm site, the cluster file does not list the measured nodes, which are compute nodes, so all measurements are kept.
    """
    names = {target.node.name for target in site.targets}
    known = all_reduces(written)
    return encodable(one for one in known if site.cluster.provider == "slurm" or names.issuperset(one.nodes))


def encodable(measured: Iterable[MeasuredAllReduce]) -> list[Any]:
    """Convert measurements to JSON values, sorted by the number of nodes and their names, so that equal measurements give equal
    files."""
    values: list[Any] = msgspec.to_builtins(sorted(measured, key=lambda one: (len(one.nodes), _key(one))))
    return values


def _key(one: MeasuredAllReduce) -> tuple[tuple[str, ...], str]:
    return one.nodes, one.backend
