"""One call of the command `jobs`: its arguments, and what they name."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from shardlab import cluster
from shardlab.cluster import Cluster
from shardlab.console import Output
from shardlab.workspace import Workspace


class Invocation:
    """The arguments of one call, where it prints, its workspace, and its cluster."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Raises InputError if the workspace is not a folder."""
        self.arguments = arguments
        self.out = Output.of(arguments)
        self.workspace = Workspace.find(getattr(arguments, "workspace", None))

    @functools.cached_property
    def cluster(self) -> Cluster:
        """The cluster of --cluster, else of the workspace, else this machine; its file is read once. Raises InputError."""
        file: str | None = getattr(self.arguments, "cluster", None)
        return cluster.find(Path(file) if file else None, self.workspace.path)
