"""Finds the node that a run lost: its telemetry stopped while the telemetry of the other nodes continued."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.record import Sample, read_lines
from shardlab.rundir import RunDir

SILENT_S = 10.0  # telemetry is sampled twice a second; what ends with the run ends on all nodes within seconds


def nodes(folder: RunDir, hosts: Sequence[str]) -> list[str]:
    """The lost ones of the machines on which a run was running. A run on one machine lost this machine; [] if not known."""
    if len(hosts) == 1:
        return list(hosts)
    last = {
        host: max((s.wall_s for s in read_lines(folder.samples_file(host), Sample).records), default=None) for host in hosts
    }
    heard = [wall_s for wall_s in last.values() if wall_s is not None]
    latest = max(heard, default=0.0)
    return [host for host, wall_s in last.items() if wall_s is not None and wall_s < latest - SILENT_S]
