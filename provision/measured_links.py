"""Writes the all-reduces that the acceptance checks measured into the inventory of the workspace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from provision import inventory_file
from provision.operation import Site
from provision.verify import Finding
from shardlab.cluster.all_reduce import MeasuredAllReduce
from shardlab.files import files
from shardlab.workspace.inventory import path_of


def record(site: Site, findings: Sequence[Finding], *, again: bool) -> None:
    """Write the all-reduces that the checks measured into the inventory. Raises WorkspaceError.

    again: whether a new measurement replaces an earlier measurement of the same nodes and backend. If not, the earlier
    measurement stays, so that a command that has nothing to change does not change the inventory. Nothing is written if nothing
    was measured, or if the inventory is missing or describes another cluster.
    """
    measured = [one for finding in findings for one in finding.outcome.all_reduces]
    written = inventory_file.read(site.workspace)
    known = inventory_file.decoded(written)
    if not measured or known.get("cluster") != site.cluster.name:
        return
    earlier = inventory_file.all_reduces(written)
    kept = {_key(one): one for one in ([*earlier, *measured] if again else [*measured, *earlier])}
    content = inventory_file.encoded({**known, "all_reduces": encodable(kept.values())})
    if content != written:
        files.write_atomic(path_of(site.workspace), content)


def of_present_nodes(site: Site, written: bytes | None) -> list[Any]:
    """The measurements in the bytes of an inventory whose nodes still belong to the cluster, as JSON values.

    On a Slurm site, the cluster file does not list the measured nodes, which are compute nodes, so all measurements are kept.
    """
    names = {target.node.name for target in site.targets}
    known = inventory_file.all_reduces(written)
    return encodable(one for one in known if site.cluster.provider == "slurm" or names.issuperset(one.nodes))


def encodable(measured: Iterable[MeasuredAllReduce]) -> list[Any]:
    """Convert measurements to JSON values, sorted by the number of nodes and their names, so that equal measurements give equal
    files."""
    values: list[Any] = msgspec.to_builtins(sorted(measured, key=lambda one: (len(one.nodes), _key(one))))
    return values


def _key(one: MeasuredAllReduce) -> tuple[tuple[str, ...], str]:
    return one.nodes, one.backend
