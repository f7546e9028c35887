"""The lease of a cluster of lent machines: when it ends, when and where this was read, and when users are reminded of it.

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
from shardlab.cloudlab.cloudlab_experiment import MANIFEST_FOLDER
from shardlab.files import files, json_file
from shardlab.terminal import moments

STALE_AFTER = timedelta(hours=6)  # if the end of the lease was read longer ago, the lease may have been extended or ended since
ALLOWED_AHEAD = timedelta(minutes=5)  # allowed error of a clock; if a lease was read further in the future, some clock is wrong
# Before the end of the lease, users are asked to copy their runs; enough time on a home network
REMIND_BEFORE = timedelta(hours=2)
SOURCE_PHRASES = {"manifest": "the manifest", "portal": "the portal"}
PORTAL_FILE = "lease.json"  # a file in the folder of the stored manifests, with the end of the lease as the portal reported it

Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class Lease(msgspec.Struct, frozen=True):
    """The lease of a cluster: when its machines are taken back, and from where and when this was read."""

    expires: Moment
    """The end of the lease. After this time, the nodes and everything on their disks are gone."""
    read: Moment
    """How recent `expires` is: the time at which the file of the manifest was written, or at which the portal was asked."""
    source: Literal["manifest", "portal"]
    """From where the end was read."""

    def compute_left_s(self, current_time: datetime) -> float:
        """The seconds until the end of the lease; negative after the end."""
        return (self.expires - current_time).total_seconds()

    def has_ended(self, current_time: datetime) -> bool:
        """Whether the lease has ended."""
        return current_time >= self.expires

    def is_stale(self, current_time: datetime) -> bool:
        """Whether the end of the lease was read so long ago that it may have changed, or at a time that cannot be correct."""
        return current_time - self.read > STALE_AFTER or self.was_read_in_future(current_time)

    def was_read_in_future(self, current_time: datetime) -> bool:
        """Whether `read`, the time at which the end of the lease was read, is in the future, so that some clock is wrong."""
        return self.read - current_time > ALLOWED_AHEAD

    def describe(self, current_time: datetime) -> str:
        """A sentence that says when the lease ends and when this time was read; a second sentence if the lease is stale."""
        left_s = self.compute_left_s(current_time)
        distance_text = f"in {moments.format_duration(left_s)}" if left_s > 0 else f"{moments.format_duration(-left_s)} ago"
        age_text = f"{moments.format_duration(max((current_time - self.read).total_seconds(), 0))} ago"
        if self.was_read_in_future(current_time):
            age_text = f"at {moments.format_time(self.read)}, which lies ahead, so a clock is wrong"
        verb = "ends" if left_s > 0 else "ended"
        origin = SOURCE_PHRASES[self.source]
        sentence = f"the lease {verb} {moments.format_time(self.expires)}, {distance_text} (read {age_text}, from {origin})."
        if self.is_stale(current_time):
            manifest_hint = " with a new manifest" if self.source == "manifest" else ""
            sentence += (
                f" This is stale: the lease may have been extended or ended since; run `provision CLUSTER.yaml`{manifest_hint}."
            )
        return sentence

    def make_copy_reminder(self, current_time: datetime) -> str | None:
        """A sentence that asks the user to copy the runs, during the last two hours of the lease; else None."""
        if not timedelta() < self.expires - current_time <= REMIND_BEFORE:
            return None
        left = moments.format_duration(self.compute_left_s(current_time))
        return f"the lease ends in {left}, and then the runs on the nodes are lost; copy them to your machine: collect fetch"


class _PortalLease(msgspec.Struct, frozen=True):
    """The content of lease.json: the end of the lease according to the last answer of the portal."""

    schema: Literal[1]
    expires: Moment
    read: Moment
    source: Literal["portal"]


def read_newest_lease(shardlab_folder: Path, manifest_paths: Sequence[Path]) -> Lease | None:
    """The lease according to the newest source, which is the manifests or the portal; None if no source says when the lease
    ends.

    shardlab_folder: the folder .shardlab of the workspace. manifest_paths: the paths of the manifests that the cluster file
    names; if empty, the manifests in .shardlab are used. Raises InputError, WorkspaceError."""
    manifest_paths = manifest_paths or cloudlab_experiment.list_stored_manifests(shardlab_folder)
    # First in the list: the portal is used if the manifests are as new
    portal_lease = _read_portal_lease(shardlab_folder / MANIFEST_FOLDER / PORTAL_FILE)
    leases = [lease for lease in (portal_lease, _read_manifest_lease(manifest_paths)) if lease is not None]
    current_time = datetime.now(UTC)
    return max(leases, key=lambda lease: (not lease.was_read_in_future(current_time), lease.read), default=None)


def store_portal_lease(shardlab_folder: Path, expires: datetime) -> None:
    """Store the end of the lease that the portal has just reported, together with the current time. Raises WorkspaceError.

    shardlab_folder: the folder .shardlab of the workspace. expires: the end of the lease, with a time zone.
    """
    files.make_folder(shardlab_folder / MANIFEST_FOLDER)
    portal_lease = _PortalLease(1, expires.astimezone(UTC), datetime.now(UTC).replace(microsecond=0), "portal")
    files.write_json(shardlab_folder / MANIFEST_FOLDER / PORTAL_FILE, portal_lease)


def _read_manifest_lease(manifests: Sequence[Path]) -> Lease | None:
    """The lease according to the manifests: its end is the earliest end in them. None if no manifest contains an end.

    `read_time` is the time at which the oldest of the files was written, because an old file contains no newer information even
    if it is read again now."""
    if not manifests:
        return None
    experiment = cloudlab_manifest.parse_manifests((str(path), cloudlab_manifest.read_manifest(path)) for path in manifests)
    if experiment.expires is None:
        return None
    read_time = datetime.fromtimestamp(int(min(path.stat().st_mtime for path in manifests)), UTC)
    return Lease(datetime.fromisoformat(experiment.expires).astimezone(UTC), read_time, "manifest")


def _read_portal_lease(path: Path) -> Lease | None:
    portal_lease = json_file.read_json(path, _PortalLease, "is not what the portal said of a lease ({}). Remove this file.")
    if portal_lease is None:
        return None
    return Lease(portal_lease.expires.astimezone(UTC), portal_lease.read.astimezone(UTC), portal_lease.source)
