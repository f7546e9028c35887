"""Unpacks an archive, which may be malicious: writes only plain files with expected names, and no more bytes than expected."""

from __future__ import annotations

import contextlib
import gzip
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from provision.datasets.formats import DataSetFormat, check_image_start
from shardlab.errors import InputError

CHUNK_BYTES = 2**20
MOST_HEADER_BYTES = 2**20  # between two members; a header has 512 bytes, a long name a few more, padding up to 20 KiB
MEMBER_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


class ArchiveMember(NamedTuple):
    """A plain file in an archive, and the tar file from which it can be read until the next member is asked for."""

    tar_file: tarfile.TarFile
    header: tarfile.TarInfo

    def open(self) -> IO[bytes]:
        member_stream = self.tar_file.extractfile(self.header)
        assert member_stream is not None  # extractfile returns None only for a member that is not a plain file
        return member_stream


def unpack_archive(archive_path: Path, data_format: DataSetFormat, folder: Path, name_prefix: str = "") -> None:
    """Write the members of a tar file, plain or gzipped, into the new folder `folder`. Raises InputError or OSError.

    name_prefix: a prefix for the names of members, for an archive that contains only a part of the data set.
    Names, types, sizes and the number of members are checked against `data_format` before a byte of a member is written.
    """
    written_bytes = 0
    with archive_path.open("rb") as archive_stream, raise_damage_as_input_error(archive_path):
        for member in read_members(archive_path, archive_stream, data_format.most_files, data_format.most_bytes):
            member_name = member.header.name
            name_match = data_format.member_re.fullmatch(name_prefix + member_name.removeprefix("./").removeprefix(name_prefix))
            if name_match is None:
                raise make_foreign_member_error(archive_path, member_name, data_format.allowed_members)
            written_bytes += member.header.size
            write_member(archive_path, member, folder / name_match["kept"], must_be_image=data_format.is_linked)
    if not written_bytes:
        raise InputError(f"{archive_path}: contains no data. Allowed: {data_format.allowed_members}.")


def read_members(
    archive_name: Path | str, archive_stream: IO[bytes], most_files: int, most_bytes: int, *, may_be_zipped: bool = True
) -> Iterator[ArchiveMember]:
    """The plain files of a tar file, in the order of the tar file; folders are skipped. Each file is checked before it is
    yielded. Iterate inside `with raise_damage_as_input_error(archive_name)`, which turns errors of a damaged archive
    into InputError.

    archive_name: the name of the archive in messages. archive_stream: its bytes, which are read once, from the start to the
    end. most_files, most_bytes: the largest number of members, and the largest sum of their sizes.
    may_be_zipped: whether the archive may be gzipped; `archive_stream` must then support seek.

    Raises InputError for a member with another type or a path out of its folder, and for a damaged archive.
    """
    member_count = total_bytes = 0
    with _open_archive(archive_name, archive_stream, may_be_zipped=may_be_zipped) as (open_tar, limiter):
        while True:
            limiter.bytes_left = MOST_HEADER_BYTES
            member_info = open_tar.next()
            if member_info is None:
                break
            open_tar.members.clear()  # type: ignore[attr-defined]  # otherwise a million headers would stay in memory
            member_count += 1
            if member_count > most_files:
                raise InputError(f"{archive_name}: has more than {most_files} members, the most that this set may have.")
            _check_member_path(archive_name, member_info.name)
            if member_info.isdir():
                continue
            _check_member_kind(archive_name, member_info)
            total_bytes += member_info.size
            if total_bytes > most_bytes:
                raise InputError(f"{archive_name}: unpacks to more than {most_bytes} bytes, the most that this set may have.")
            limiter.bytes_left += member_info.size
            yield ArchiveMember(open_tar, member_info)


def make_foreign_member_error(archive_name: Path | str, member_name: str, allowed_members: str) -> InputError:
    """The error for a member that does not belong to the data set. allowed_members: the allowed members, in words."""
    return InputError(f"{archive_name}: the member {member_name!r} does not belong to this set. Allowed: {allowed_members}.")


def _check_member_path(archive: Path | str, member_name: str) -> None:
    """Check the path of a member. Raises InputError if the path leads out of the folder into which the archive is unpacked."""
    if member_name.startswith("/"):
        raise InputError(f"{archive}: the member {member_name!r} has an absolute path. Allowed: paths within the archive.")
    if ".." in member_name.split("/"):
        raise InputError(f"{archive}: the member {member_name!r} leads out of its folder. Allowed: paths within the archive.")


def _check_member_kind(archive_name: Path | str, member: tarfile.TarInfo) -> None:
    """Raises InputError if a member is not a plain file."""
    member_name = member.name
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
        member_kind = MEMBER_KINDS.get(member.type, "a sparse file" if member.isreg() else f"of the type {member.type!r}")
        raise InputError(f"{archive_name}: the member {member_name!r} is {member_kind}. Allowed: plain files.")
    if member.size < 0:
        raise InputError(f"{archive_name}: the member {member_name!r} has a size below 0.")


def write_member(archive_name: Path | str, member: ArchiveMember, target_path: Path, *, must_be_image: bool) -> None:
    """Write a member to a file that must not exist yet. must_be_image: whether its first bytes must be those of an image.

    Raises InputError if the member occurs twice or is truncated.
    """
    member_stream, member_name = member.open(), member.header.name
    target_path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(target_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise InputError(f"{archive_name}: the member {member_name!r} occurs twice. Allowed: once.") from None
    with os.fdopen(descriptor, "wb") as target_file:
        bytes_left = member_bytes = member.header.size
        while bytes_left:
            chunk = member_stream.read(min(CHUNK_BYTES, bytes_left))
            if not chunk:
                raise InputError(f"{archive_name}: ends within the member {member_name!r}; the archive is truncated.")
            if must_be_image and bytes_left == member_bytes:
                check_image_start(f"{archive_name}: the member {member_name!r}", chunk[:4])
            target_file.write(chunk)
            bytes_left -= len(chunk)


class _Limiter:
    """A file from which at most `bytes_left` more bytes can be read, so that a malicious header cannot make tarfile read
    forever."""

    def __init__(self, archive_file: IO[bytes], archive_name: Path | str) -> None:
        self._file, self._archive_name = archive_file, archive_name
        self.bytes_left = MOST_HEADER_BYTES

    def read(self, most_bytes: int) -> bytes:
        chunk = self._file.read(most_bytes)
        self.bytes_left -= len(chunk)
        if self.bytes_left < 0:
            raise InputError(f"{self._archive_name}: unpacks to more than its members say, or has a header of more than 1 MiB.")
        return chunk


@contextlib.contextmanager
def raise_damage_as_input_error(archive_name: Path | str) -> Iterator[None]:
    """Turn the errors that a damaged archive causes in the `with` block into InputError. The block reads the archive."""
    try:
        yield
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{archive_name}: is not a whole tar file, plain or gzipped: {error}.") from None


@contextlib.contextmanager
def _open_archive(archive: Path | str, raw: IO[bytes], *, may_be_zipped: bool) -> Iterator[tuple[tarfile.TarFile, _Limiter]]:
    """Open an archive as a stream that is read once. Yields (the open tar file, the object that
    limits how many bytes are read from it)."""
    with contextlib.ExitStack() as open_files:
        is_zipped = may_be_zipped and raw.read(2) == b"\x1f\x8b"
        if may_be_zipped:
            raw.seek(0)
        limiter = _Limiter(open_files.enter_context(gzip.open(raw)) if is_zipped else raw, archive)  # type: ignore[arg-type]
        yield open_files.enter_context(tarfile.open(fileobj=limiter, mode="r|", errorlevel=2)), limiter  # type: ignore[call-overload]
