"""The lease of a cluster whose machines are lent for a time: when the lease ends, and when and from where this time was read.

`provision` writes the lease into the inventory. The end of the lease is taken from the manifests of the CloudLab experiment, or
from the portal if the portal's answer is newer than the manifests.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shardlab.cloudlab import cloudlab_experiment, cloudlab_manifest
from shardlab.cloudlab.cloudlab_experiment import MANIFESTS
from shardlab.files import files, json_file
from shardlab.terminal import moments

STALE = timedelta(hours=6)  # if the end of the lease was read longer ago, the lease may have been extended or ended since
AHEAD = timedelta(minutes=5)  # allowed error of a clock; if a lease was read further in the future, some clock is wrong
URGED = timedelta(hours=2)  # before the end of the lease, users are asked to copy their runs; enough time on a home network
SOURCES = {"manifest": "the manifest", "portal": "the portal"}
PORTAL_FILE = "lease.json"  # a file in the folder of the stored manifests, with the end of the lease as the portal reported it

Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class Lease(msgspec.Struct, frozen=True):
    """The lease of a cluster: when its machines are taken back, and from where and when this was read."""

    expires: Moment
    """The end of the lease. After this time, the nodes and everything on their disks are gone."""
    read: Moment
    """How recent `expires` is: the time at which the file of the manifest was written, or at which the portal was asked."""
    source: Literal["manifest", "portal"]  # from where the end was read

    def left_s(self, now: datetime) -> float:
        """The seconds until the end of the lease; negative after the end."""
        return (self.expires - now).total_seconds()

    def has_ended(self, now: datetime) -> bool:
        """Whether the lease has ended."""
        return now >= self.expires

    def is_stale(self, now: datetime) -> bool:
        """Whether the end of the lease was read so long ago that it may have changed, or at a time that cannot be correct."""
        return now - self.read > STALE or self.lies_ahead(now)

    def lies_ahead(self, now: datetime) -> bool:
        """Whether `read`, the time at which the end of the lease was read, is in the future, so that some clock is wrong."""
        return self.read - now > AHEAD

    def in_words(self, now: datetime) -> str:
        """A sentence that says when the lease ends and when this time was read; a second sentence if the lease is stale."""
        left = self.left_s(now)
        when = f"in {moments.duration(left)}" if left > 0 else f"{moments.duration(-left)} ago"
        age = f"{moments.duration(max((now - self.read).total_seconds(), 0))} ago"
        if self.lies_ahead(now):
            age = f"at {moments.in_words(self.read)}, which lies ahead, so a clock is wrong"
        verb = "ends" if left > 0 else "ended"
        sentence = f"the lease {verb} {moments.in_words(self.expires)}, {when} (read {age}, from {SOURCES[self.source]})."
        if self.is_stale(now):
            again = " with a new manifest" if self.source == "manifest" else ""
            sentence += f" This is stale: the lease may have been extended or ended since; run `provision CLUSTER.yaml`{again}."
        return sentence

    def urge(self, now: datetime) -> str | None:
        """A sentence that asks the user to copy the runs, during the last two hours of the lease; else None."""
        if not timedelta() < self.expires - now <= URGED:
            return None
        left = moments.duration(self.left_s(now))
        return f"the lease ends in {left}, and then the runs on the nodes are lost; copy them to your machine: collect fetch"


class _FromPortal(msgspec.Struct, frozen=True):
    """The content of lease.json: the end of the lease according to the last answer of the portal."""

    schema: Literal[1]
    expires: Moment
    read: Moment
    source: Literal["portal"]


def newest(own: Path, manifests: Sequence[Path]) -> Lease | None:
    """The lease according to the newest source, which is the manifests or the portal; None if no source says when the lease
    ends.

    own: the folder .shardlab of the workspace. manifests: the paths of the manifests that the cluster file names; if empty, the
    manifests in .shardlab are used. Raises InputError, WorkspaceError.
    """
    manifests = manifests or cloudlab_experiment.manifests(own)
    said = _of_portal(own / MANIFESTS / PORTAL_FILE)  # first in the list: the portal is used if the manifests are as new
    leases = [lease for lease in (said, _of_manifests(manifests)) if lease is not None]
    now = datetime.now(UTC)
    return max(leases, key=lambda lease: (not lease.lies_ahead(now), lease.read), default=None)


def keep(own: Path, expires: datetime) -> None:
    """Store the end of the lease that the portal has just reported, together with the current time. Raises WorkspaceError.

    own: the folder .shardlab of the workspace. expires: the end of the lease, with a time zone.
    """
    files.make_folder(own / MANIFESTS)
    said = _FromPortal(1, expires.astimezone(UTC), datetime.now(UTC).replace(microsecond=0), "portal")
    files.write_json(own / MANIFESTS / PORTAL_FILE, said)


def _of_manifests(manifests: Sequence[Path]) -> Lease | None:
    """The lease according to the manifests: its end is the earliest end in them. None if no manifest contains an end.

    `read` is the time at which the oldest of the files was written, because an old file contains no newer information even if
    it is read again now.
    """
    if not manifests:
        return None
    experiment = cloudlab_manifest.parse((str(path), cloudlab_manifest.read(path)) for path in manifests)
    if experiment.expires is None:
        return None
    read = datetime.fromtimestamp(int(min(path.stat().st_mtime for path in manifests)), UTC)
    return Lease(datetime.fromisoformat(experiment.expires).astimezone(UTC), read, "manifest")


def _of_portal(path: Path) -> Lease | None:
    said = json_file.read(path, _FromPortal, "is not what the portal said of a lease ({}). Remove this file.")
    if said is None:
        return None
    return Lease(said.expires.astimezone(UTC), said.read.astimezone(UTC), said.source)
