"""A cluster as its file says it: where runs happen and where their data lies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from shardlab import document, shape
from shardlab.errors import InputError

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")]


SetName = Literal["cifar10", "mnist", "imagenet"]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class DataSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data set and where it comes from.

    archive: an http(s) URL, or a tar file or folder, whose path is relative to the workspace unless absolute; null: the
    set is in the data path already. sha256: the archive's, required for a URL.
    """

    name: SetName
    archive: str | None = None
    sha256: Sha256 | None = None

    @property
    def is_url(self) -> bool:
        return self.archive is not None and "://" in self.archive


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where data sets lie (null: `.shardlab/data` in the workspace) and which of them `provision` stages there."""

    path: str | None = None
    sets: list[SetName | DataSet] = []

    def named(self) -> list[DataSet]:
        """All sets, also those that the file gives as a bare name."""
        return [DataSet(name=one) if isinstance(one, str) else one for one in self.sets]


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
    _check_sets(text, cluster.data.named())
    return cluster


def _check_sets(text: document.Document, sets: list[DataSet]) -> None:
    for index, one in enumerate(sets):
        place = ("data", "sets", index)
        if one.name in [other.name for other in sets[:index]]:
            raise text.error(place, f"the set {one.name} stands twice.")
        if one.archive is None:
            if one.sha256 is not None:
                raise text.error(
                    (*place, "sha256"), "a checksum without an archive. Allowed: both, an archive alone, or neither."
                )
            continue
        if not one.archive.strip():
            raise text.error((*place, "archive"), "found an empty path. Allowed: a URL, a path, or null.")
        if one.is_url:
            url = urlsplit(one.archive)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise text.error((*place, "archive"), f"found {one.archive!r}. Allowed: http://, https://, or a path.")
            if url.username or url.password:
                raise text.error((*place, "archive"), "a URL with a user or password in it. Allowed: one without secrets.")
            if one.sha256 is None:
                raise text.error(place, "a URL without a checksum. Allowed: one with its sha256 beside it.")


def find(given: Path | None, workspace: Path) -> Cluster:
    """The cluster that a command means: the file given, else the workspace's cluster.yaml, else this machine."""
    if given is not None:
        return load(given)
    own = workspace / "cluster.yaml"
    if own.is_symlink() and not own.exists():
        raise InputError(f"{own}: a link to a file that is not there.")
    return load(own) if own.exists() else THIS_MACHINE
