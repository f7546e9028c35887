"""The messages of transfers: how a machine downloads runs from the cluster, and how the first node exchanges files with others.

All messages go over one connection. Each message is a line of JSON. For a download (collect.fetching.sender):

1. The machine that downloads names runs (AskedRuns).
2. The cluster answers with a RunOffers message, and an OfferedRun for each run.
3. The machine that downloads names the runs that it wants, and the files of them that it has already (WantedRuns).
4. For each of these runs, the cluster sends a FileBegin for each file and after it the content, and at the end a RunEnd.

Between nodes that share no folder (shardlab.transfer.node_files), the first node asks for files (AskedFiles), and the other
node sends them as in step 4. Or the first node offers files (OfferedFiles), the other node answers with the names of those that
it wants, the first node sends them as in step 4, and the other node answers `true` when they are in their places.

If the content to send fits into one block, the cluster reads the content first, and FileBegin.follows says how many bytes
follow. Otherwise, or if the file became shorter, the content is sent in blocks, so that its end is known in each case. A block
is a length (4 bytes, the highest first) and that many bytes. A block of length 0 ends the content.
"""

from __future__ import annotations

import struct
from typing import Literal, cast

import msgspec

from shardlab.record_types import Count, Integer, RunId, Sha256
from shardlab.transfer.manifest import RunManifest

BLOCK_BYTES = 1 << 17  # the most bytes of a block, before it is compressed: so few that they stay in the cache of a processor
BLOCK_LENGTH = struct.Struct(">I")  # how the length of a block is written

WantedIf = Literal["different", "missing", "longer"]


class AskedRuns(msgspec.Struct):
    """Which runs the cluster offers: those whose id matches one of the patterns, or all runs if there are no patterns."""

    patterns: list[str]


class RunOffers(msgspec.Struct):
    """The beginning of the cluster's answer."""

    runs: Count
    """How many OfferedRun messages follow."""
    descriptions: dict[str, bytes]
    """The descriptions of matrices in .shardlab (`fetch_matrices.read_matrices`)."""


class OfferedRun(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One run on the cluster."""

    run: RunId
    state: str
    complete: bool
    """Whether the run has ended and all its parts are on the cluster, so that its files should not change."""
    bytes: Count = 0
    """Size of all files of the run, for the progress."""
    manifest: RunManifest | None = None
    """None: its files are hashed when they are sent."""
    problems: list[str] = []
    """How the run on the cluster differs from its manifest, one clause per difference."""
    not_regular: dict[str, str] = {}
    """Name of an entry that is neither a regular file nor a folder -> its kind."""
    parts: list[str] = []
    """Sentences: which node's part of the run is missing, or differs from the files of the first node."""
    pruned: bool = False
    """Whether files of the run were removed on the cluster."""


class HeldFile(msgspec.Struct):
    """A file, or the beginning of a file, that the machine that downloads has already."""

    bytes: Count
    """Its size."""
    sha256: Sha256
    """SHA-256 of its content."""


class WantedRun(msgspec.Struct):
    """A run that the machine that downloads wants."""

    run: str
    """The run id."""
    names: list[str] | None
    """The files that are wanted; None: all files of the run."""
    held: dict[str, HeldFile]
    """By name of the file: what need not be sent, if the file on the cluster begins with it."""


class WantedRuns(msgspec.Struct):
    """The runs that the machine that downloads wants."""

    runs: list[WantedRun]
    is_shared: bool
    """Whether both machines see the workspace on the cluster, e.g. on shared storage. The content of files is not sent then."""


class FileBegin(msgspec.Struct, tag="file", omit_defaults=True):
    """The beginning of a file of a run. Its content follows, except if the storage is shared."""

    name: str
    begin: Count
    """How many bytes at the beginning of the file are not sent, because they are held."""
    bytes: Count
    """Size of the file when the cluster began to send it."""
    mtime_ns: Integer
    """Time of its last change, in ns since the epoch."""
    is_compressed: bool = False
    """Whether each block is compressed with zstd."""
    follows: Count | None = None
    """Size of the only block, which follows without its length; None: blocks follow."""


class RunEnd(msgspec.Struct, tag="end"):
    """The end of the files of a run."""

    manifest: RunManifest | None
    """The files of the run as they were sent; None: as in OfferedRun."""
    problems: list[str] = []
    """Why wanted files were not sent, or how they differ from the manifest in OfferedRun."""


class AskedFiles(msgspec.Struct, tag="asked"):
    """The files that the first node wants from another node. A file that the other node does not have is not sent."""

    most_bytes: dict[str, Count | None]
    """By path relative to the folder of all runs: how many bytes are sent at most; None: the whole file."""
    held: dict[str, HeldFile] = {}
    """As in WantedRun."""


class OfferedFile(msgspec.Struct):
    """A file, a folder or a symlink that the first node offers to another node."""

    mode: Count
    """Its kind and its permissions, as in os.stat_result."""
    bytes: Count
    mtime_ns: Integer
    link: str = ""
    """The text of a symlink."""
    wanted_if: WantedIf = "different"
    """When the other node replaces its own file: if it has another size, time or mode; never; or if it is shorter."""


class OfferedFiles(msgspec.Struct, tag="offered"):
    """What the first node offers to another node."""

    files: dict[str, OfferedFile]
    """By path relative to the workspace."""


# The first message of the first node to another node.
NODE_REQUEST = cast("type[AskedFiles | OfferedFiles]", AskedFiles | OfferedFiles)
# What the cluster sends of a run: a FileBegin for each file, and a RunEnd at the end.
FILE_OR_END = cast("type[FileBegin | RunEnd]", FileBegin | RunEnd)
