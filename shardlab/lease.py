"""The lease of a cluster whose machines are lent: when it ends, when this was read, and from where.

`provision` writes it into the inventory. The end comes from the manifests of the experiment, or from the portal if it was asked
later than the manifests were taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shardlab import cloudlab_experiment, cloudlab_manifest, files, moments
from shardlab.cloudlab_experiment import MANIFESTS
from shardlab.decoders import DECODE_FAULTS
from shardlab.errors import InputError

STALE = timedelta(hours=6)  # after this time since the reading, somebody may have extended or ended the experiment
AHEAD = timedelta(minutes=5)  # between the clocks of two machines; a reading that lies further ahead was by a wrong clock
URGED = timedelta(hours=2)  # before the end: time to copy the runs of a study over a home's connection
SOURCES = {"manifest": "the manifest", "portal": "the portal"}
PORTAL_FILE = "lease.json"  # beside the manifests of an experiment of the portal

Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class Lease(msgspec.Struct, frozen=True):
    """When the machines of a cluster are taken back."""

    expires: Moment
    """The end of the lease. Then the nodes and everything on their disks are gone."""
    read: Moment
    """When the source said so: the time at which the manifest was taken, or the portal was asked."""
    source: Literal["manifest", "portal"]

    def left_s(self, now: datetime) -> float:
        """The seconds until its end; negative after it."""
        return (self.expires - now).total_seconds()

    def has_ended(self, now: datetime) -> bool:
        """Whether its end is over."""
        return now >= self.expires

    def is_stale(self, now: datetime) -> bool:
        """Whether its end may have changed since it was read; also if it is not known when it was read."""
        return now - self.read > STALE or self.lies_ahead(now)

    def lies_ahead(self, now: datetime) -> bool:
        """Whether it seems to have been read in the future: this clock, or that of the reading, is wrong."""
        return self.read - now > AHEAD

    def in_words(self, now: datetime) -> str:
        """A sentence that says when the lease ends and how old this knowledge is; a second sentence if it is stale."""
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
        """The sentence that urges to copy the runs, from two hours before the end until the end; else None."""
        if not timedelta() < self.expires - now <= URGED:
            return None
        left = moments.duration(self.left_s(now))
        return f"the lease ends in {left}, and then the runs on the nodes are lost; copy them to your machine: collect fetch"


class _FromPortal(msgspec.Struct, frozen=True):
    """The file with what the portal said last."""

    schema: Literal[1]
    expires: Moment
    read: Moment
    source: Literal["portal"]


def newest(own: Path, manifests: Sequence[Path]) -> Lease | None:
    """The lease as it was read last; None if nothing says when it ends. Raises InputError.

    own: the folder .shardlab of the workspace. manifests: those that the cluster file names; none: those in .shardlab.
    """
    manifests = manifests or cloudlab_experiment.manifests(own)
    said = _of_portal(own / MANIFESTS / PORTAL_FILE)  # the first: it counts if both were read in the same second
    leases = [lease for lease in (said, _of_manifests(manifests)) if lease is not None]
    now = datetime.now(UTC)
    return max(leases, key=lambda lease: (not lease.lies_ahead(now), lease.read), default=None)


def keep(own: Path, expires: datetime) -> None:
    """Keep the end that the portal states now. own: the folder .shardlab of the workspace. Raises WorkspaceError."""
    files.make_folder(own / MANIFESTS)
    said = _FromPortal(1, expires.astimezone(UTC), datetime.now(UTC).replace(microsecond=0), "portal")
    files.write_json(own / MANIFESTS / PORTAL_FILE, said)


def _of_manifests(manifests: Sequence[Path]) -> Lease | None:
    """The lease that ends first. Its manifest is as old as its file: reading an old file again makes nothing newer."""
    if not manifests:
        return None
    experiment = cloudlab_manifest.parse((str(path), cloudlab_manifest.read(path)) for path in manifests)
    if experiment.expires is None:
        return None
    read = datetime.fromtimestamp(int(min(path.stat().st_mtime for path in manifests)), UTC)
    return Lease(datetime.fromisoformat(experiment.expires).astimezone(UTC), read, "manifest")


def _of_portal(path: Path) -> Lease | None:
    try:
        said = msgspec.json.decode(files.read(path), type=_FromPortal)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}. Allowed: what the portal said of the lease.") from None
    except DECODE_FAULTS as error:
        raise InputError(f"{path}: is not what the portal said of a lease ({error}). Remove this file.") from None
    return Lease(said.expires.astimezone(UTC), said.read.astimezone(UTC), said.source)
