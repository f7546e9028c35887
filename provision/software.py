"""The Python software that every node needs: the tested set of packages, and our own source."""

from __future__ import annotations

import functools
import hashlib
import io
import re
import tarfile
from importlib import metadata

from shardlab import code
from shardlab.errors import ShardlabError

EXTRAS = ("trainers",)
PACKAGES = ("shardlab", "matrices", "templates", "provision", "jobs", "trainers", "collect")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


@functools.cache
def constraints() -> bytes:
    """The bundled constraints file. Raises ShardlabError where this installation lacks it."""
    for path in (code.ROOT / "constraints.txt", code.ROOT / "shardlab" / "constraints.txt"):
        if path.is_file():
            return path.read_bytes()
    raise ShardlabError("this installation of shardlab lacks its constraints.txt; install shardlab again.")


@functools.cache
def requirements() -> tuple[str, ...]:
    """What pip is asked for: our own requirements with the extras that nodes need."""
    wanted = []
    for line in metadata.requires("shardlab") or ():
        extra = _EXTRA.search(line)
        if extra is None or extra[1] in EXTRAS:
            wanted.append(line.split(";")[0].strip())
    return tuple(sorted(set(wanted)))


@functools.cache
def digest() -> str:
    """12 hexadecimal digits over the packages, which name the environment."""
    return hashlib.sha256(b"\n".join([constraints(), *(line.encode() for line in requirements())])).hexdigest()[:12]


@functools.cache
def source() -> bytes:
    """Our own packages as a tar file; the same files always give the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in code.sources(PACKAGES):
            entry = tarfile.TarInfo(path.relative_to(code.ROOT).as_posix())
            entry.size, entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as handle:
                archive.addfile(entry, handle)
    return buffer.getvalue()


def source_digest() -> str:
    return hashlib.sha256(source()).hexdigest()[:12]
