"""Unpacks an archive, which may be malicious: writes only plain files with expected names, and no more bytes than expected."""

from __future__ import annotations

import contextlib
import gzip
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from provision.datasets.formats import Format, check_image_start
from shardlab.errors import InputError

CHUNK = 2**20
HEADERS = 2**20  # the most bytes between two members; a header has 512 bytes, a long name a few more, and padding up to 20 KiB
KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


def unpack(archive: Path, wanted: Format, folder: Path, within: str = "") -> None:
    """Write the members of a tar file, plain or gzipped, into the new folder `folder`. Raises InputError or OSError.

    within: a prefix for the names of members, for an archive that contains only a part of the data set.
    Names, types, sizes and the number of members are checked against `wanted` before a byte of a member is written.
    """
    members = written = 0
    with _opened(archive) as (tar, meter):
        while True:
            meter.left = HEADERS
            member = tar.next()
            if member is None:
                break
            tar.members.clear()  # type: ignore[attr-defined]  # otherwise a million headers would stay in memory
            members += 1
            if members > wanted.most_files:
                raise InputError(f"{archive}: has more than {wanted.most_files} members, the most that this set may have.")
            _check_path(archive, member.name)
            if member.isdir():
                continue
            kept = _kept(archive, member, wanted, within)
            written += member.size
            if written > wanted.most_bytes:
                raise InputError(f"{archive}: unpacks to more than {wanted.most_bytes} bytes, the most that this set may have.")
            meter.left += member.size
            _write(archive, tar, member, folder / kept, image=wanted.linked)
    if not written:
        raise InputError(f"{archive}: contains no data. Allowed: {wanted.spoken}.")


def _check_path(archive: Path, name: str) -> None:
    """Check the path of a member. Raises InputError if the path leads out of the folder into which the archive is unpacked."""
    if name.startswith("/"):
        raise InputError(f"{archive}: the member {name!r} has an absolute path. Allowed: paths within the archive.")
    if ".." in name.split("/"):
        raise InputError(f"{archive}: the member {name!r} leads out of its folder. Allowed: paths within the archive.")


def _kept(archive: Path, member: tarfile.TarInfo, wanted: Format, within: str) -> str:
    """The path within the data set's folder to which a member is unpacked.

    Raises InputError if the member is not a plain file, or does not belong to the data set.
    """
    name = member.name
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
        kind = KINDS.get(member.type, "a sparse file" if member.isreg() else f"of the type {member.type!r}")
        raise InputError(f"{archive}: the member {name!r} is {kind}. Allowed: plain files.")
    match = wanted.member.fullmatch(within + name.removeprefix("./").removeprefix(within))
    if match is None:
        raise InputError(f"{archive}: the member {name!r} does not belong to this set. Allowed: {wanted.spoken}.")
    if member.size < 0:
        raise InputError(f"{archive}: the member {name!r} has a size below 0.")
    return match["kept"]


def _write(archive: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path, *, image: bool) -> None:
    source = tar.extractfile(member)
    assert source is not None  # extractfile returns None only for a member that is not a plain file
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise InputError(f"{archive}: the member {member.name!r} occurs twice. Allowed: once.") from None
    with os.fdopen(descriptor, "wb") as target:
        left = member.size
        while left:
            piece = source.read(min(CHUNK, left))
            if not piece:
                raise InputError(f"{archive}: ends within the member {member.name!r}; the archive is truncated.")
            if image and left == member.size:
                check_image_start(f"{archive}: the member {member.name!r}", piece[:4])
            target.write(piece)
            left -= len(piece)


class _Meter:
    """A file from which at most `left` more bytes can be read, so that a malicious header cannot make tarfile read forever."""

    def __init__(self, file: IO[bytes], archive: Path) -> None:
        self._file, self._archive = file, archive
        self.left = HEADERS

    def read(self, size: int) -> bytes:
        piece = self._file.read(size)
        self.left -= len(piece)
        if self.left < 0:
            raise InputError(f"{self._archive}: unpacks to more than its members say, or has a header of more than 1 MiB.")
        return piece


@contextlib.contextmanager
def _opened(archive: Path) -> Iterator[tuple[tarfile.TarFile, _Meter]]:
    """Open an archive, plain or gzipped, as a stream that is read once. An error in the archive raises InputError in the block.

    Yields (the open tar file, the meter that limits how many bytes are read from it).
    """
    with archive.open("rb") as raw, contextlib.ExitStack() as opened:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        meter = _Meter(opened.enter_context(gzip.open(raw)) if zipped else raw, archive)  # type: ignore[arg-type]
        try:
            with tarfile.open(fileobj=meter, mode="r|", errorlevel=2) as tar:  # type: ignore[call-overload]
                yield tar, meter
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{archive}: is not a whole tar file, plain or gzipped: {error}.") from None
