"""One call of the command `jobs`: its arguments, and the workspace and the cluster that the arguments name."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from shardlab.cluster import cluster
from shardlab.cluster.cluster import Cluster
from shardlab.terminal.console import Output
from shardlab.workspace.workspace import Workspace


class Invocation:
    """One call of the command `jobs`. arguments: the arguments of the command line. out: prints results and remarks."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Find the workspace that the arguments name. Raises InputError if the workspace is not a folder."""
        self.arguments = arguments
        self.out = Output.from_arguments(arguments)
        self.workspace = Workspace.find(getattr(arguments, "workspace", None))

    @functools.cached_property
    def cluster(self) -> Cluster:
        """The cluster: from the file of --cluster, else from cluster.yaml of the workspace, else this machine. The file is read
        only once. Raises InputError."""
        file: str | None = getattr(self.arguments, "cluster", None)
        return cluster.find_cluster(Path(file) if file else None, self.workspace.path)
