"""A cluster as its file says it: where runs happen and where their data lies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shardlab import document, shape
from shardlab.errors import InputError

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")]


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where data sets lie; null means `.shardlab/data` in the workspace."""

    path: str | None = None


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """cluster.yaml. `provider: local` is this machine: one node, its own processors and GPUs."""

    schema: Literal[1]
    name: Name
    provider: Literal["local"]
    data: Data = msgspec.field(default_factory=Data)


THIS_MACHINE = Cluster(schema=1, name="local", provider="local")


def load(path: Path) -> Cluster:
    """Read and check a cluster file. Raises InputError with file:line:column for every problem in it."""
    text = document.load(path)
    cluster = shape.convert(text, Cluster)
    if cluster.data.path is not None and not cluster.data.path.strip():
        raise text.error(("data", "path"), "found an empty path. Allowed: a folder, or null.")
    return cluster


def find(given: Path | None, workspace: Path) -> Cluster:
    """The cluster that a command means: the file given, else the workspace's cluster.yaml, else this machine."""
    if given is not None:
        return load(given)
    own = workspace / "cluster.yaml"
    if own.is_symlink() and not own.exists():
        raise InputError(f"{own}: a link to a file that is not there.")
    return load(own) if own.exists() else THIS_MACHINE
