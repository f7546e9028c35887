"""The limits of Slurm's partitions. By default (EnforcePartLimits=NO), Slurm accepts a job above a limit of its partition, and
never starts it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jobs.slurm.commands import call_slurm

_WORD_PATTERN = re.compile(r"(\w+)=(\S*)")
_TIME_PATTERN = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?\Z")


def read_partitions(limit_s: float, cluster: str | None) -> list[dict[str, str]]:
    """The partitions, each as the words that Slurm prints about it, such as MaxTime; empty if Slurm does not answer. limit_s,
    cluster: as in `call_slurm`."""
    output = call_slurm(["scontrol", "--oneliner", "show", "partition"], cluster=cluster, limit_s=limit_s)
    partitions = [dict(_WORD_PATTERN.findall(line)) for line in output.stdout.splitlines() if output.exit_code == 0]
    return [partition for partition in partitions if "PartitionName" in partition]


def find_exceeded_limit(partitions: Sequence[dict[str, str]], job_options: Sequence[str]) -> str:
    """A clause about the limit of its partition that a job exceeds; '' if a partition that the job may use allows it.

    job_options: the sbatch options of the job; the last of equal options counts. A job with a QOS is not checked, because the
    QOS may have limits of its own instead.
    """
    value_by_option = dict(option.removeprefix("--").partition("=")[::2] for option in job_options)
    partition_names = set(value_by_option["partition"].split(",")) if "partition" in value_by_option else None
    usable_partitions = [
        partition
        for partition in partitions
        if (partition["PartitionName"] in partition_names if partition_names is not None else partition.get("Default") == "YES")
    ]
    if "qos" in value_by_option or not usable_partitions:
        return ""
    excess_clauses = [_describe_excess(partition, value_by_option) for partition in usable_partitions]
    return excess_clauses[0] if all(excess_clauses) else ""


def _describe_excess(partition: dict[str, str], value_by_option: dict[str, str]) -> str:
    partition_name, node_text = partition["PartitionName"], value_by_option.get("nodes", "")
    requested_s, longest_s = _parse_time_s(value_by_option.get("time", "")), _parse_time_s(partition.get("MaxTime", ""))
    if requested_s is not None and longest_s is not None and requested_s > longest_s:
        return (
            f"the time limit {requested_s // 60} min is above MaxTime={partition['MaxTime']} of the partition {partition_name}"
        )
    most_nodes = partition.get("MaxNodes", "")
    if node_text.isdigit() and most_nodes.isdigit() and int(node_text) > int(most_nodes):
        return f"the node count {node_text} is above MaxNodes={most_nodes} of the partition {partition_name}"
    return ""


def _parse_time_s(time_text: str) -> int | None:
    """A time of Slurm, such as 30 (minutes), 01:00:00 or 1-12, in seconds; None for UNLIMITED and other words."""
    if (time_match := _TIME_PATTERN.match(time_text)) is None:
        return None
    first_number, second_number, third_number = (int(time_match[name] or 0) for name in ("first", "second", "third"))
    if time_match["days"] is not None:
        return int(time_match["days"]) * 86400 + first_number * 3600 + second_number * 60 + third_number
    if time_match["third"] is not None:
        return first_number * 3600 + second_number * 60 + third_number
    return first_number * 60 + second_number
