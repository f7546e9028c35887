"""Which cluster Slurm's commands address, at a site whose Slurm has several clusters (Slurm's option --clusters).

Each cluster numbers its own jobs, so a command that addresses another cluster would show or cancel another job."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardlab.errors import InputError
from shardlab.record_types import SLURM_CLUSTER_PATTERN

if TYPE_CHECKING:  # this module is imported by commands that read no cluster file
    from shardlab.cluster.cluster import Cluster

VARIABLE = "SLURM_CLUSTERS"  # the variable by which users and modules of a site choose the clusters of Slurm's commands
ALL = "all"  # Slurm's word for all clusters
_HEADER = re.compile(r"^CLUSTER: .*\n?", re.M)  # the line that Slurm's commands print before the rows of a cluster


def choose_slurm_cluster(cluster: Cluster) -> str | None:
    """The cluster to which jobs are submitted: `slurm.cluster`, else the cluster in SLURM_CLUSTERS; None: the default cluster
    of this machine. Raises InputError if SLURM_CLUSTERS names several clusters."""
    if cluster.provider != "slurm" or cluster.slurm is None or cluster.slurm.cluster is not None:
        return cluster.slurm.cluster if cluster.slurm is not None else None
    text = os.environ.get(VARIABLE, "")
    if text and (text == ALL or not re.search(SLURM_CLUSTER_PATTERN, text)):
        raise InputError(
            f"the environment variable {VARIABLE} is {text!r}, but a run needs one cluster. Allowed: the name of one cluster, "
            "or the key slurm.cluster in the cluster file."
        )
    return text or None


def address_cluster(command_words: Sequence[str], slurm_cluster: str | None) -> list[str]:
    """The words of one of Slurm's commands, so that it addresses this cluster. None: the default cluster."""
    return [command_words[0], *([f"--clusters={slurm_cluster}"] if slurm_cluster is not None else []), *command_words[1:]]


def drop_cluster_headers(command_output: str) -> str:
    """The output of one of Slurm's commands without the lines that name a cluster: also with --noheader, a command that was
    told a cluster prints such a line before the rows of the cluster."""
    return _HEADER.sub("", command_output)
