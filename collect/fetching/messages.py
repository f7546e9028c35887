"""The messages between the machine that downloads runs and the cluster (collect.fetching.sender, collect.fetching.download).

All messages go over one connection. Each message is a line of JSON:

1. The machine that downloads names runs (Asked).
2. The cluster answers with an Offers message, and an OfferedRun for each run.
3. The machine that downloads names the runs that it wants (Wanted), once or several times.
4. For each of these runs, the cluster sends a ListedRun. The machine that downloads then copies the files with rsync. In the
   meantime the cluster hashes them, and sends a CheckedRun for each run.
"""

from __future__ import annotations

import msgspec

from collect.fetching.manifest import RunManifest
from shardlab.record_types import Count, RunId


class Asked(msgspec.Struct):
    """Which runs the cluster offers: those whose id matches one of the patterns, or all runs if there are no patterns."""

    patterns: list[str]


class Offers(msgspec.Struct):
    """The beginning of the cluster's answer."""

    runs: Count
    """How many OfferedRun messages follow."""
    descriptions: dict[str, bytes]
    """The descriptions of matrices in .shardlab (`fetch_matrices.read`)."""


class OfferedRun(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One run on the cluster."""

    run: RunId
    state: str
    complete: bool
    """Whether the run has ended and all its parts are on the cluster, so that its files should not change."""
    manifest: RunManifest | None = None
    """None: its files are hashed while they are copied."""
    problems: list[str] = []
    """How the run on the cluster differs from its manifest, one clause per difference."""
    not_regular: dict[str, str] = {}
    """Name of an entry that is neither a regular file nor a folder -> its kind."""
    parts: list[str] = []
    """Sentences: which node's part of the run is missing, or differs from the files of the first node."""
    pruned: bool = False
    """Whether files of the run were removed on the cluster."""


class Wanted(msgspec.Struct):
    """The runs that the machine that downloads wants."""

    runs: list[str]
    """The run ids."""


class ListedRun(msgspec.Struct):
    """The files that a wanted run has at this moment. What is appended to a file later is not part of the copy."""

    files: dict[str, Count]
    """Size in bytes, by name."""


class CheckedRun(msgspec.Struct):
    """What the files in the ListedRun message contain."""

    manifest: RunManifest | None
    """Their sizes and SHA-256; None: as in OfferedRun, or they could not be read."""
    problems: list[str] = []
    """Why files could not be read, or how the run differs from the manifest in OfferedRun."""
