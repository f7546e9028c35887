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
from shardlab.files.source_digest import ROOT, list_source_files

INSTALLED_EXTRAS = ("trainers",)
PYTHON_RANGE = ">=3.11"
# Prints the version of an interpreter and of each package that it can import. Not every environment has pip.
LISTING_PROGRAM = """\
import sys
from importlib import metadata
print('python==%d.%d.%d' % sys.version_info[:3])
for package in metadata.distributions():
    print('%s==%s' % (package.metadata['Name'], package.version))
"""


@functools.cache
def read_constraints(requirements: tuple[str, ...] = ()) -> bytes:
    """The bundled constraints file, without the packages whose version is fixed in `requirements`. Raises ShardlabError if this
    installation lacks the file."""
    fixed_names = {canonicalize_name(requirement.partition("==")[0]) for requirement in requirements if "==" in requirement}
    for constraints_path in (ROOT / "constraints.txt", ROOT / "shardlab" / "constraints.txt"):
        if constraints_path.is_file():
            lines = constraints_path.read_bytes().splitlines(keepends=True)
            return b"".join(line for line in lines if canonicalize_name(line.decode().partition("==")[0]) not in fixed_names)
    raise ShardlabError("this installation of shardlab lacks its constraints.txt; install shardlab again.")


@functools.cache
def list_required_packages(extras: tuple[str, ...] = INSTALLED_EXTRAS, own_packages: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The requirements of shardlab with these extras, and `own_packages`, the packages of the cluster file, which pip installs.
    The commands of shardlab need no extra, because only ranks need torch."""
    needed = {package for package in map(Requirement, metadata.requires("shardlab") or ()) if _is_needed(package, extras)}
    return tuple(sorted({f"{package.name}{package.specifier}" for package in needed} | set(own_packages)))


def _is_needed(requirement: Requirement, extras: tuple[str, ...]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))


@functools.cache
def compute_packages_digest(extras: tuple[str, ...] = INSTALLED_EXTRAS, own_packages: tuple[str, ...] = ()) -> str:
    """A digest of the required packages and their versions, 12 hexadecimal digits. The path of an environment contains it.
    Arguments: as for `list_required_packages`."""
    digest_parts = [read_constraints(own_packages), *map(str.encode, list_required_packages(extras, own_packages))]
    return hashlib.sha256(b"\n".join(digest_parts)).hexdigest()[:12]


@functools.cache
def make_source_archive() -> bytes:
    """The source of shardlab's packages as a tar file. The same source always gives the same bytes."""
    archive_buffer = io.BytesIO()
    with tarfile.open(fileobj=archive_buffer, mode="w") as archive:
        for path in list_source_files(PACKAGES):
            tar_entry = tarfile.TarInfo(path.relative_to(ROOT).as_posix())
            tar_entry.size, tar_entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as source_file:
                archive.addfile(tar_entry, source_file)
    return archive_buffer.getvalue()


def digest_source() -> str:
    """A digest of shardlab's source, 12 hexadecimal digits. It tells whether a node has the same source."""
    return hashlib.sha256(make_source_archive()).hexdigest()[:12]


class PackageDifferences(msgspec.Struct, frozen=True):
    """How an environment that shardlab did not create differs from the tested packages; only for directly required packages."""

    missing_clauses: list[str]
    """A clause for each package that is missing."""
    other_version_clauses: list[str]
    """A clause for each package with a version that was not tested."""


def compare_packages(listing: str) -> PackageDifferences:
    """Compare the packages of an environment with the tested packages. listing: the output of the program LISTING_PROGRAM in
    that environment."""
    version_by_package: dict[str, Version] = {}
    for line in listing.splitlines():
        package_name, _, installed_version = line.strip().partition("==")
        with contextlib.suppress(InvalidVersion):
            # of copies, Python imports the first
            version_by_package.setdefault(canonicalize_name(package_name), Version(installed_version))
    lines = [line.partition("==") for line in read_constraints().decode().splitlines() if not line.startswith("#")]
    pinned_by_package = {canonicalize_name(package_name): words.split()[0] for package_name, _, words in lines if words}
    missing_packages, other_versions = [], []
    python_version = version_by_package.get(canonicalize_name("python"))
    if python_version is None or python_version not in SpecifierSet(PYTHON_RANGE):
        missing_packages.append(f"Python {PYTHON_RANGE}{f' (it is {python_version})' if python_version is not None else ''}")
    for requirement in map(Requirement, list_required_packages()):
        package_name = canonicalize_name(requirement.name)
        package_version, tested_version = version_by_package.get(package_name), pinned_by_package.get(package_name)
        if package_version is None:
            missing_packages.append(requirement.name)
        elif package_version.public != tested_version:
            is_in_range = requirement.specifier.contains(package_version, prereleases=True)
            limit = "" if is_in_range else f"; outside of the range {requirement.specifier} of shardlab"
            other_versions.append(f"{requirement.name} {package_version} (tested: {tested_version or 'no version'}{limit})")
    return PackageDifferences(missing_packages, other_versions)
