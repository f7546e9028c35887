"""A digest of our source and of the installed packages. A run refuses to start if it changed since the run was submitted."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("shardlab", "matrices", "templates", "jobs", "trainers", "collect")


def digest() -> str:
    """12 hexadecimal digits over the names and versions of the installed packages and all our files that a run may use."""
    found = hashlib.sha256()
    for name in sorted(_installed()):
        found.update(name.encode() + b"\n")
    for path in sources(PACKAGES):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\n")
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def sources(packages: Iterable[str]) -> Iterator[Path]:
    """The files of packages of ours, package by package, in the order of their names."""
    for package in packages:
        for path in sorted((ROOT / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith("."):
                yield path


def _installed() -> set[str]:
    """Names and versions, from the names of pip's folders: reading their files would take seconds on slow storage."""
    # setuptools adds a folder `_vendor` with its own copies of packages to sys.path when a process imports it.
    folders = (Path(entry) for entry in sys.path if entry and Path(entry).name != "_vendor")
    return {found.name for folder in folders if folder.is_dir() for found in folder.glob("*.dist-info")}
