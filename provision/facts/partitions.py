"""The partitions of a Slurm cluster, with their limits, as its controller describes them."""

from __future__ import annotations

import re

import msgspec

from provision.fact import FactQuery
from provision.facts.slurm_text import is_name, parse_limit, parse_names, parse_pairs
from shardlab.cluster.slurm_time import parse_duration_s


class SitePartition(msgspec.Struct, frozen=True):
    """A partition of a Slurm site. A limit is None if the partition does not have it, or if Slurm does not show it."""

    name: str
    is_default: bool
    is_up: bool
    max_time_s: int | None
    default_time_s: int | None
    max_nodes: int | None
    accounts: tuple[str, ...] | None
    """Accounts that may use the partition; None: all."""
    qos: tuple[str, ...] | None
    """QOS that jobs of the partition may have; None: all."""
    is_exclusive: bool
    """Whether a job in the partition always gets whole nodes."""
    denied_accounts: tuple[str, ...] = ()
    """Accounts that may not use the partition; read by Slurm only if `accounts` is None."""
    denied_qos: tuple[str, ...] = ()
    """QOS that jobs of the partition may not have; Slurm reads them only if `qos` is None."""
    is_root_only: bool = False
    """Whether only root may submit jobs to the partition."""


def build_command(python: str) -> list[str]:
    return ["scontrol", "show", "partition", "--oneliner"]


def parse(stdout: str) -> tuple[SitePartition, ...]:
    """The partitions, in the order in which Slurm's controller prints them. Partitions whose name is not a plain word are left
    out. Raises ValueError if no line describes a partition."""
    partition_values = [parse_pairs(line) for line in stdout.splitlines() if line.startswith("PartitionName=")]
    if not partition_values:
        raise ValueError(f"no line begins with PartitionName=: {re.sub(r'[^ -~]', '?', stdout[:80])!r}.")
    return tuple(
        SitePartition(
            name=line["PartitionName"],
            is_default=line.get("Default") == "YES",
            is_up=line.get("State", "UP") == "UP",
            max_time_s=parse_duration_s(line.get("MaxTime", "")),
            default_time_s=parse_duration_s(line.get("DefaultTime", "")),
            max_nodes=parse_limit(line.get("MaxNodes", "")),
            accounts=parse_names(line.get("AllowAccounts", "ALL")),
            qos=parse_names(line.get("AllowQos", "ALL")),
            is_exclusive=line.get("OverSubscribe", "").startswith("EXCLUSIVE")
            or line.get("Exclusive") in ("NODE", "TOPO"),  # the key `Exclusive` of Slurm 26.05 and newer
            denied_accounts=parse_names(line.get("DenyAccounts", "")) or (),
            denied_qos=parse_names(line.get("DenyQos", "")) or (),
            is_root_only=line.get("RootOnly") == "YES",
        )
        for line in partition_values
        if is_name(line["PartitionName"])
    )


PARTITIONS = FactQuery("partitions", build_command, parse, timeout_s=60)
