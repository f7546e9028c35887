"""Finds out whether this machine is the node of a cluster without Slurm on which commands about runs are executed."""

from __future__ import annotations

from socket import gethostname

from shardlab.cluster.cluster import Cluster


def is_on_first_node(cluster: Cluster) -> bool:
    """Whether this machine has the name or the address of the cluster's controller (without this role, of its first node)."""
    first = cluster.controller
    return first is not None and (gethostname().partition(".")[0] == first.name or first.host in _list_own_addresses())


def _list_own_addresses() -> set[str]:
    """The addresses of this machine, without the addresses of the loopback interface."""
    import psutil  # imported only here, because the import would slow down commands such as `provision --help`

    entries = (entry for name, nic_addresses in psutil.net_if_addrs().items() if name != "lo" for entry in nic_addresses)
    return {entry.address for entry in entries}
