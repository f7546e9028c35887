"""Caches telemetry as Parquet in this user's cache folder, because decoding the lines of a long run takes many times longer.

A file of the cache repeats the beginning of one file of lines. It consists of the SHA-256 of all that follows, one line of JSON
(`CacheHeader`), and four Parquet tables. The lines stay the record: if the file of lines is not the same as when it was cached,
by its path, inode, size and time, the SHA-256 of the lines decides whether the cache is used. A file of the cache that is
damaged, or that this program did not write, is not used; it is written again. Without a folder that is safe to write to,
nothing is stored, and the lines are decoded each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardlab.errors import WorkspaceError
from shardlab.files import files, own_folder, source_digest
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.record_types import Count, Integer, Sha256, WallTime
from shardlab.runs.record import Sample, decode_lines

if TYPE_CHECKING:  # frames need the extra `report`, which `collect fetch` works without
    from collect.sources.samples import Samples

BLOCK = 1 << 21  # bytes of lines that are read and decoded at a time, because records need several times more memory
LEAST = 1 << 20  # a file with fewer bytes is decoded each time: this takes 20 ms, and most runs of a sweep have such files
LEAST_NEW = 1 << 18  # fewer new bytes are not added to the cache but decoded each time, which takes 5 ms
MOST_BYTES = 2 << 30  # the largest size of the whole cache; the files that were not used for the longest time are removed
_DIGEST = 64  # characters of a SHA-256


class LinesState(msgspec.Struct, frozen=True):
    """Identifies a file and its content without reading the content: if the content changes, the state changes."""

    path_sha256: Sha256
    """SHA-256 of the path."""
    inode: int
    bytes: Count
    """Size of the file in bytes."""
    mtime_ns: Integer
    """Time of the last change, in ns since the epoch."""


class CacheHeader(msgspec.Struct, frozen=True):
    """What a file of the cache contains."""

    code: str
    """The digest of the source that wrote it: another version may decode lines in another way."""
    lines: LinesState
    """The state of the file of lines."""
    end: Count
    """The number of bytes of the lines that the tables repeat: the first lines of the file."""
    sha256: Sha256
    """SHA-256 of these bytes."""
    corrupt: Count
    """The number of these lines that cannot be read."""
    last_wall_s: WallTime
    """The time of the last sample in these lines, in seconds since the epoch; 0: no sample."""
    tables: list[Count]
    """The size of each Parquet table in bytes."""


class CachedSamples(msgspec.Struct, frozen=True):
    """The samples in the first lines of a file."""

    header: CacheHeader
    frames: Samples | None
    """The samples; None if the frames were not requested."""


class SampleLines:
    """An open file of samples, one sample per line. Lines may be appended while the file is read."""

    def __init__(self, path: str) -> None:
        """Open a regular file. Raises OSError, NotRegular."""
        self._descriptor, self.size = files.open_descriptor(path)
        self._path = path

    def __enter__(self) -> SampleLines:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def state(self) -> LinesState:
        """The present state of the file. Raises OSError."""
        status = os.fstat(self._descriptor)
        path_sha256 = hashlib.sha256(os.fsencode(os.path.realpath(self._path))).hexdigest()
        return LinesState(path_sha256, status.st_ino, status.st_size, status.st_mtime_ns)

    def read_blocks(self, begin: int, end: int | None = None) -> Iterator[bytes]:
        """The lines from a byte on, in blocks of whole lines. begin: a byte at which a line begins. Raises OSError.

        end: only whole lines before this byte are read; None: all lines are read, and if the last line of the file has no line
        break, it is the last block.
        """
        rest: list[bytes] = []  # the beginning of a line whose end is in a later block
        while end is None or begin < end:
            # One byte more than the file has: fewer bytes than requested are the end of the file.
            read_size = min(BLOCK, end - begin if end is not None else self.size - begin + 1 if begin <= self.size else BLOCK)
            block = os.pread(self._descriptor, read_size, begin)
            begin += len(block)
            if cut := block.rfind(b"\n") + 1:
                yield b"".join([*rest, block[:cut]])
                rest = []
            rest.append(block[cut:])
            if len(block) < read_size:
                break
        if end is None and any(rest):
            yield b"".join(rest)

    def hash_beginning(self, end: int) -> hashlib._Hash:
        """The SHA-256 of the first `end` bytes, to which later bytes can be added. Raises OSError."""
        digest = hashlib.sha256()
        block, begin = memoryview(bytearray(1 << 18)), 0  # a block of this size stays in the cache of a processor core
        while begin < end and (count := os.preadv(self._descriptor, [block[: end - begin]], begin)):
            digest.update(block[:count])
            begin += count
        return digest


def read_cached_samples(lines: SampleLines, *, with_frames: bool, verify: bool) -> CachedSamples | None:
    """The samples of all lines but the last LEAST_NEW bytes. They come from the cache, to which missing lines are added.

    with_frames: whether frames are needed, and not only the header. verify: whether to compare the SHA-256 of the lines also if
    the file has the same size and time as when it was cached. None: all lines must be decoded, because they are few, or because
    the packages of frames are not installed. Raises OSError if the lines cannot be read.
    """
    if lines.size < LEAST:
        return None
    state = lines.state()
    cached_samples = _load_cached_samples(lines, state, with_frames=with_frames, verify=verify)
    can_extend = all(map(importlib.util.find_spec, ("numpy", "polars")))
    if not can_extend or state.bytes - (cached_samples.header.end if cached_samples else 0) < LEAST_NEW:
        return cached_samples
    if cached_samples is not None and cached_samples.frames is None:
        cached_samples = _load_cached_samples(lines, state, with_frames=True, verify=False)
    return _extend_cached_samples(lines, state, cached_samples)


def _load_cached_samples(lines: SampleLines, state: LinesState, *, with_frames: bool, verify: bool) -> CachedSamples | None:
    """The samples in the cache; None if the cache has no samples of these lines. Raises OSError if the lines cannot be read."""
    try:
        path = _find_folder() / state.path_sha256
        content = memoryview(files.read(path, MOST_BYTES))
        header_end = bytes(content[: 1 << 16]).index(b"\n", _DIGEST)
        header = get_decoder(CacheHeader).decode(content[_DIGEST:header_end])
    except (OSError, WorkspaceError, RuntimeError, ValueError, *DECODE_FAULTS):
        return None
    is_sound = hashlib.sha256(content[_DIGEST:]).hexdigest().encode() == content[:_DIGEST]
    is_same_path = header.lines.path_sha256 == state.path_sha256 and header.code == _digest_code()
    if not is_sound or not is_same_path or header.end > state.bytes:
        return None
    if (verify or header.lines != state) and lines.hash_beginning(header.end).hexdigest() != header.sha256:
        return None
    edges = itertools.pairwise(itertools.accumulate(header.tables, initial=header_end + 1))
    tables = [bytes(content[begin:end]) for begin, end in edges]
    frames = None
    if with_frames:
        from collect.sources import samples

        if (frames := samples.decode_parquet(tables)) is None:
            return None
    if header.lines != state:
        header = msgspec.structs.replace(header, lines=state)
        _store_tables(header, tables)
    with contextlib.suppress(OSError):
        os.utime(path)  # the time of the last use
    return CachedSamples(header, frames)


def _extend_cached_samples(lines: SampleLines, state: LinesState, cached_samples: CachedSamples | None) -> CachedSamples | None:
    """Decode the whole lines that the cache does not have, and store all in the cache. Raises OSError if the lines cannot be
    read."""
    from collect.sources import samples

    begin, corrupt, last_wall_s = 0, 0, 0.0
    parts: list[Samples] = []
    if cached_samples is not None and cached_samples.frames is not None:
        begin, corrupt, last_wall_s = (
            cached_samples.header.end,
            cached_samples.header.corrupt,
            cached_samples.header.last_wall_s,
        )
        parts.append(cached_samples.frames)
    end, digest = begin, lines.hash_beginning(begin)
    for block in lines.read_blocks(begin, state.bytes):
        decoded = decode_lines(block, Sample)
        digest.update(block)
        end, corrupt = end + len(block), corrupt + decoded.corrupt
        last_wall_s = decoded.records[-1].wall_s if decoded.records else last_wall_s
        parts.append(samples.build_sample_part([{"": decoded.records}]))
    if end == begin:  # the last line is very long and incomplete
        return cached_samples
    frames = samples.join_parts(parts)
    tables = samples.encode_parquet(frames)
    header = CacheHeader(_digest_code(), state, end, digest.hexdigest(), corrupt, last_wall_s, [len(table) for table in tables])
    _store_tables(header, tables)
    return CachedSamples(header, frames)


def _store_tables(header: CacheHeader, tables: list[bytes]) -> None:
    """Write a file of the cache, unless it cannot be written. A file that is larger than the whole cache may be is not kept."""
    content = b"".join([msgspec.json.encode(header), b"\n", *tables])
    with contextlib.suppress(OSError, WorkspaceError, RuntimeError):
        path = _find_folder() / header.lines.path_sha256
        files.write_atomic(path, hashlib.sha256(content).hexdigest().encode() + content, sync=False, mode=0o600)
        _remove_oldest(path.parent)


def _remove_oldest(folder: Path) -> None:
    """Remove the files that were not used for the longest time, until the cache has at most MOST_BYTES. Raises OSError."""
    with os.scandir(folder) as entries:
        statuses = [(entry.stat(follow_symlinks=False), entry.path) for entry in entries]
    total = 0
    for _, size, path in sorted(((status.st_mtime_ns, status.st_size, path) for status, path in statuses), reverse=True):
        total += size
        if total > MOST_BYTES:
            Path(path).unlink(missing_ok=True)


def _find_folder() -> Path:
    """The folder of the cache, which only this user can open. It is made if it does not exist.

    Raises OSError, WorkspaceError or RuntimeError if it cannot be made, or would be in a folder of another user, as in a
    command that was started with sudo.
    """
    folder = own_folder.cache_path("telemetry")
    if next(path for path in folder.parents if path.exists()).stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder}: is in a folder of another user")
    files.make_folder(folder.parent)
    return own_folder.make_own_folder(folder.parent, folder.name)


@cache
def _digest_code() -> str:
    """The digest of the source that decodes lines and makes frames."""
    return source_digest.digest_packages(("collect", "shardlab"))
