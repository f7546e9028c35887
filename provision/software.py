"""The Python software that every node needs: the tested set of packages, and our own source."""

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

from shardlab.errors import ShardlabError
from shardlab.source_digest import ROOT, sources

EXTRAS = ("trainers",)
PACKAGES = ("shardlab", "matrices", "templates", "provision", "jobs", "trainers", "collect")
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
    """The requirements that pip installs: our own, with these extras. () is enough for our commands, which need no torch."""
    wanted = {line for line in map(Requirement, metadata.requires("shardlab") or ()) if _applies(line, extras)}
    return tuple(sorted({f"{line.name}{line.specifier}" for line in wanted}))


def _applies(line: Requirement, extras: tuple[str, ...]) -> bool:
    return line.marker is None or any(line.marker.evaluate({"extra": extra}) for extra in ("", *extras))


@functools.cache
def digest(extras: tuple[str, ...] = EXTRAS) -> str:
    """A digest of the packages, 12 hexadecimal digits, which is part of the environment's path."""
    return hashlib.sha256(b"\n".join([constraints(), *(line.encode() for line in requirements(extras))])).hexdigest()[:12]


@functools.cache
def source() -> bytes:
    """Our own packages as a tar file; the same files always give the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sources(PACKAGES):
            entry = tarfile.TarInfo(path.relative_to(ROOT).as_posix())
            entry.size, entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as handle:
                archive.addfile(entry, handle)
    return buffer.getvalue()


def source_digest() -> str:
    """A digest of our own source, 12 hexadecimal digits, by which a node's source is compared."""
    return hashlib.sha256(source()).hexdigest()[:12]


class PackageDifferences(msgspec.Struct, frozen=True):
    """How an environment that we did not make differs from the tested packages; only the packages that we need directly.

    missing: what is not there, each as a clause. other: packages with another version than tested, each as a clause.
    """

    missing: list[str]
    other: list[str]


def differences(listing: str) -> PackageDifferences:
    """listing: the output of the program LISTING."""
    there: dict[str, Version] = {}
    for line in listing.splitlines():
        name, _, version = line.strip().partition("==")
        with contextlib.suppress(InvalidVersion):
            there.setdefault(canonicalize_name(name), Version(version))  # Python imports the first of two
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
