"""Which transport NCCL took between nodes, by its log, and a warning if it took TCP although the nodes have RDMA."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.hardware.nccl_log import NcclTransports, add_log
from shardlab.remote.remote import CommandOutput


def read_transports(rank_outputs: Sequence[CommandOutput]) -> NcclTransports:
    """The transports in the output of all ranks of an all-reduce. NCCL writes its log to standard output."""
    transports = NcclTransports()
    for rank_output in rank_outputs:
        add_log(transports, rank_output.stdout.encode())
    return transports


def judge_transport(transports: NcclTransports, rdma_devices: Sequence[str]) -> tuple[str, str | None]:
    """Returns (a clause that says which transport NCCL took, advice if NCCL does not use the RDMA devices of the nodes).

    rdma_devices: the devices that are up, such as `mlx5_0/1`; empty: the nodes have none.
    """
    transport_text = transports.describe()
    if transport_text is None:
        return "; its transport is not known, because NCCL's log names none (NCCL_DEBUG, NCCL_DEBUG_FILE)", None
    if transports.rdma is not False or not rdma_devices:
        return f"; NCCL took {transport_text}", None
    device_names = ", ".join(sorted(set(rdma_devices)))
    return (
        f"; WARNING: NCCL fell back to TCP ({transport_text}), although there are RDMA devices ({device_names})",
        "load the site's plug-in for NCCL, or set NCCL_IB_HCA; docs/networks.md says how. Times between nodes are those of TCP",
    )
