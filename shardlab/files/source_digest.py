"""Computes digests of shardlab's source and of the installed packages.

A run refuses to start if shardlab's source or the installed packages changed after the run was submitted. To find this out, the
run compares the digests from its submission with the present digests.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardlab import PACKAGES

ROOT = Path(__file__).parents[2]
RUN_PACKAGES = tuple(name for name in PACKAGES if name != "provision")  # packages of shardlab that a run may use
# The beginning of the name of shardlab's own .dist-info folder. The digest of the installed packages leaves shardlab out,
# because a run uses a copy of shardlab's source.
OURS = "shardlab-"
BYTECODE = "__pycache__"  # the folders in which Python keeps bytecode


def source(root: Path = ROOT) -> str:
    """The digest of all files of shardlab that a run may use: 12 hexadecimal digits. root: the folder that contains shardlab's
    packages."""
    return of(RUN_PACKAGES, root)


def is_whole(copy: Path) -> bool:
    """Whether a copy of the source, whose name is its digest, has exactly the files of the digest, apart from bytecode."""
    there = {path for path in copy.rglob("*") if not path.is_dir() and BYTECODE not in path.parts}
    return there == set(sources(RUN_PACKAGES, copy)) and source(copy) == copy.name


def of(packages: Iterable[str], root: Path = ROOT) -> str:
    """The digest of all files of some of shardlab's packages: 12 hexadecimal digits.

    packages: the names of the packages. root: the folder that contains them.
    """
    sha256 = hashlib.sha256()
    for path in sources(packages, root):
        sha256.update(path.relative_to(root).as_posix().encode() + b"\n")
        sha256.update(path.read_bytes())
    return sha256.hexdigest()[:12]


def packages() -> str:
    """The digest of the names and versions of the installed packages without shardlab: 12 hexadecimal digits."""
    names = sorted(name for name in _installed() if not name.startswith(OURS))
    return hashlib.sha256("".join(f"{name}\n" for name in names).encode()).hexdigest()[:12]


def sources(packages: Iterable[str], root: Path = ROOT) -> Iterator[Path]:
    """The files of some of shardlab's packages, package by package, sorted by path within a package.

    packages: the names of the packages. root: the folder that contains them. Folders with bytecode are not looked into, because
    another process may write or remove them at any time.
    """
    for package in packages:
        found = []
        for folder, below, names in os.walk(root / package):
            below[:] = [name for name in below if name != BYTECODE]
            found += [path for name in names if not name.startswith(".") and (path := Path(folder, name)).is_file()]
        yield from sorted(found)


def _installed() -> set[str]:
    """The names of the .dist-info folders of the installed packages. Each name contains the name and version of a package.

    The files in these folders are not read, because that takes seconds on slow storage.
    """
    # When a process imports setuptools, setuptools adds its folder `_vendor`, with its own copies of packages, to sys.path.
    folders = (Path(entry) for entry in sys.path if entry and Path(entry).name != "_vendor")
    return {found.name for folder in folders if folder.is_dir() for found in folder.glob("*.dist-info")}
