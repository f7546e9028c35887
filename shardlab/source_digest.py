"""Digests of our source and of the installed packages. A run compares them with those that it was submitted with."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("shardlab", "matrices", "templates", "jobs", "trainers", "collect")  # those of which a run may use a file
OURS = "shardlab-"  # our own entry among the installed packages; a run uses a copy of our source instead


def source(root: Path = ROOT) -> str:
    """12 hexadecimal digits over all our files that a run may use. root: the folder that holds our packages."""
    return of(PACKAGES, root)


def of(packages: Iterable[str], root: Path = ROOT) -> str:
    """12 hexadecimal digits over all files of these packages of ours."""
    sha256 = hashlib.sha256()
    for path in sources(packages, root):
        sha256.update(path.relative_to(root).as_posix().encode() + b"\n")
        sha256.update(path.read_bytes())
    return sha256.hexdigest()[:12]


def packages() -> str:
    """12 hexadecimal digits over the names and versions of the installed packages, ours left out."""
    names = sorted(name for name in _installed() if not name.startswith(OURS))
    return hashlib.sha256("".join(f"{name}\n" for name in names).encode()).hexdigest()[:12]


def sources(packages: Iterable[str], root: Path = ROOT) -> Iterator[Path]:
    """The files of packages of ours, package by package, in the order of their names."""
    for package in packages:
        for path in sorted((root / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith("."):
                yield path


def _installed() -> set[str]:
    """Names and versions, from the names of pip's folders: reading their files would take seconds on slow storage."""
    # setuptools adds a folder `_vendor` with its own copies of packages to sys.path when a process imports it.
    folders = (Path(entry) for entry in sys.path if entry and Path(entry).name != "_vendor")
    return {found.name for folder in folders if folder.is_dir() for found in folder.glob("*.dist-info")}
