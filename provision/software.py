"""The Python software that every node needs: the tested set of packages, and shardlab's own source."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import tarfile
from importlib import metadata

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from shardlab import PACKAGES
from shardlab.errors import ShardlabError
from shardlab.files.source_digest import ROOT, sources

EXTRAS = ("trainers",)
PYTHON = ">=3.11"
# Prints the version of an interpreter and of each package that it can import. Not every environment has pip.
LISTING = """\
import sys
from importlib import metadata
print('python==%d.%d.%d' % sys.version_info[:3])
for package in metadata.distributions():
    print('%s==%s' % (package.metadata['Name'], package.version))
"""


@functools.cache
def constraints() -> bytes:
    """The bundled constraints file. Raises ShardlabError if this installation lacks it."""
    for path in (ROOT / "constraints.txt", ROOT / "shardlab" / "constraints.txt"):
        if path.is_file():
            return path.read_bytes()
    raise ShardlabError("this installation of shardlab lacks its constraints.txt; install shardlab again.")


@functools.cache
def requirements(extras: tuple[str, ...] = EXTRAS) -> tuple[str, ...]:
    """The requirements of shardlab with these extras, which pip installs. The commands of shardlab need no extra, because only
    ranks need torch."""
    wanted = {line for line in map(Requirement, metadata.requires("shardlab") or ()) if _applies(line, extras)}
    return tuple(sorted({f"{line.name}{line.specifier}" for line in wanted}))


def _applies(line: Requirement, extras: tuple[str, ...]) -> bool:
    return line.marker is None or any(line.marker.evaluate({"extra": extra}) for extra in ("", *extras))


@functools.cache
def digest(extras: tuple[str, ...] = EXTRAS) -> str:
    """A digest of the required packages and their versions, 12 hexadecimal digits. The path of an environment contains it."""
    return hashlib.sha256(b"\n".join([constraints(), *(line.encode() for line in requirements(extras))])).hexdigest()[:12]


@functools.cache
def source() -> bytes:
    """The source of shardlab's packages as a tar file. The same source always gives the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sources(PACKAGES):
            entry = tarfile.TarInfo(path.relative_to(ROOT).as_posix())
            entry.size, entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as handle:
                archive.addfile(entry, handle)
    return buffer.getvalue()


def source_digest() -> str:
    """A digest of shardlab's source, 12 hexadecimal digits. It tells whether a node has the same source."""
    return hashlib.sha256(source()).hexdigest()[:12]


class PackageDifferences(msgspec.Struct, frozen=True):
    """How an environment that shardlab did not create differs from the tested packages; only for directly required packages.

    missing: a clause for each package that is missing. other: a clause for each package with a version that was not tested.
    """

    missing: list[str]
    other: list[str]


def differences(listing: str) -> PackageDifferences:
    """Compare the packages of an environment with the tested packages. listing: the output of the program LISTING in that
    environment."""
    there: dict[str, Version] = {}
    for line in listing.splitlines():
        name, _, version = line.strip().partition("==")
        with contextlib.suppress(InvalidVersion):
            there.setdefault(canonicalize_name(name), Version(version))  # of several copies, Python imports the first
    lines = [line.partition("==") for line in constraints().decode().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(name): words.split()[0] for name, _, words in lines if words}
    missing, other = [], []
    python = there.get(canonicalize_name("python"))
    if python is None or python not in SpecifierSet(PYTHON):
        missing.append(f"Python {PYTHON}{f' (it is {python})' if python is not None else ''}")
    for needed in map(Requirement, requirements()):
        found, tested = there.get(canonicalize_name(needed.name)), pinned.get(canonicalize_name(needed.name))
        if found is None:
            missing.append(needed.name)
        elif found.public != tested:
            is_stated = needed.specifier.contains(found, prereleases=True)
            limit = "" if is_stated else f"; outside of the range {needed.specifier} of shardlab"
            other.append(f"{needed.name} {found} (tested: {tested or 'no version'}{limit})")
    return PackageDifferences(missing, other)
