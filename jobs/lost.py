"""Which node of a run was lost: the one whose telemetry fell silent while that of the others went on."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.record import Sample, read_lines
from shardlab.rundir import RunDir

SILENT_S = 10.0  # telemetry is sampled twice a second; what ends with the run ends on all nodes within seconds


def nodes(folder: RunDir, hosts: Sequence[str]) -> list[str]:
    """Of the machines where a run was at work those that were lost; the only one it had, or none where it cannot be told."""
    if len(hosts) == 1:
        return list(hosts)
    last = {
        host: max((s.wall_s for s in read_lines(folder.samples_file(host), Sample).records), default=None) for host in hosts
    }
    heard = [wall_s for wall_s in last.values() if wall_s is not None]
    latest = max(heard, default=0.0)
    return [host for host, wall_s in last.items() if wall_s is not None and wall_s < latest - SILENT_S]
