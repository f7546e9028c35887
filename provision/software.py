"""The Python software that every node needs: the tested set of packages, and our own source."""

from __future__ import annotations

import functools
import hashlib
import io
import re
import tarfile
from importlib import metadata

from shardlab.errors import ShardlabError
from shardlab.source_digest import ROOT, sources

EXTRAS = ("trainers",)
PACKAGES = ("shardlab", "matrices", "templates", "provision", "jobs", "trainers", "collect")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


@functools.cache
def constraints() -> bytes:
    """The bundled constraints file. Raises ShardlabError if this installation lacks it."""
    for path in (ROOT / "constraints.txt", ROOT / "shardlab" / "constraints.txt"):
        if path.is_file():
            return path.read_bytes()
    raise ShardlabError("this installation of shardlab lacks its constraints.txt; install shardlab again.")


@functools.cache
def requirements() -> tuple[str, ...]:
    """The requirements that pip installs: our own, with the extras that nodes need."""
    wanted = []
    for line in metadata.requires("shardlab") or ():
        extra = _EXTRA.search(line)
        if extra is None or extra[1] in EXTRAS:
            wanted.append(line.split(";")[0].strip())
    return tuple(sorted(set(wanted)))


@functools.cache
def digest() -> str:
    """A digest of the packages, 12 hexadecimal digits, which is part of the environment's path."""
    return hashlib.sha256(b"\n".join([constraints(), *(line.encode() for line in requirements())])).hexdigest()[:12]


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


def differences(freeze: str) -> tuple[list[str], list[str]]:
    """(the packages that an environment lacks, those with another version than tested); only those that we need directly.

    freeze: the output of `pip list --format=freeze`.
    """
    there = {_plain(name): version for name, _, version in (line.partition("==") for line in freeze.splitlines()) if version}
    pinned = dict(line.split("==") for line in constraints().decode().splitlines() if "==" in line and not line.startswith("#"))
    needed = {_plain(_NAME.match(word)[0]) for word in requirements()}  # type: ignore[index]
    missing = sorted(name for name in needed if name not in there)
    others = sorted(
        f"{name} {there[_plain(name)]} (tested: {version.split()[0]})"
        for name, version in pinned.items()
        if _plain(name) in needed and _plain(name) in there and there[_plain(name)] != version.split()[0]
    )
    return missing, others


def _plain(name: str) -> str:
    """A package's name as pip compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()
