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
from shardlab.runs.record import Sample, decode_records

if TYPE_CHECKING:  # frames need the extra `report`, which `collect fetch` works without
    from collect.sources.samples import Samples

BLOCK_BYTES = 1 << 21  # bytes of lines that are read and decoded at a time, because records need several times more memory
# a file with fewer bytes is decoded each time: this takes 20 ms, and most runs of a sweep have such files
LEAST_CACHED_BYTES = 1 << 20
LEAST_ADDED_BYTES = 1 << 18  # fewer new bytes are not added to the cache but decoded each time, which takes 5 ms
MOST_CACHE_BYTES = 2 << 30  # the largest size of the whole cache; the files that were not used for the longest time are removed
_DIGEST_CHARACTERS = 64  # characters of a SHA-256


class LinesFileState(msgspec.Struct, frozen=True):
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
    lines: LinesFileState
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
        self._descriptor, self.file_bytes = files.open_descriptor(path)
        self._path = path

    def __enter__(self) -> SampleLines:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read_state(self) -> LinesFileState:
        """The present state of the file. Raises OSError."""
        file_status = os.fstat(self._descriptor)
        path_sha256 = hashlib.sha256(os.fsencode(os.path.realpath(self._path))).hexdigest()
        return LinesFileState(path_sha256, file_status.st_ino, file_status.st_size, file_status.st_mtime_ns)

    def read_blocks(self, begin_byte: int, end_byte: int | None = None) -> Iterator[bytes]:
        """The lines from a byte on, in blocks of whole lines. begin_byte: a byte at which a line begins. Raises OSError.

        end_byte: only whole lines before this byte are read; None: all lines are read, and if the last line of the file has no
        line break, it is the last block."""
        unfinished_line: list[bytes] = []  # the beginning of a line whose end is in a later block
        while end_byte is None or begin_byte < end_byte:
            # One byte more than the file has: fewer bytes than requested are the end of the file.
            known_end = self.file_bytes + 1 if end_byte is None else end_byte
            read_size = min(BLOCK_BYTES, known_end - begin_byte) if begin_byte < known_end else BLOCK_BYTES
            read_block = os.pread(self._descriptor, read_size, begin_byte)
            begin_byte += len(read_block)
            if whole_bytes := read_block.rfind(b"\n") + 1:
                yield b"".join([*unfinished_line, read_block[:whole_bytes]])
                unfinished_line = []
            unfinished_line.append(read_block[whole_bytes:])
            if len(read_block) < read_size:
                break
        if end_byte is None and any(unfinished_line):
            yield b"".join(unfinished_line)

    def hash_beginning(self, end_byte: int) -> hashlib._Hash:
        """The SHA-256 of the first `end_byte` bytes, to which later bytes can be added. Raises OSError."""
        digest = hashlib.sha256()
        block, hashed_bytes = (memoryview(bytearray(1 << 18)), 0)  # a block of this size stays in the cache of a processor core
        while hashed_bytes < end_byte and (
            read_bytes := os.preadv(self._descriptor, [block[: end_byte - hashed_bytes]], hashed_bytes)
        ):
            digest.update(block[:read_bytes])
            hashed_bytes += read_bytes
        return digest


def read_cached_samples(sample_lines: SampleLines, *, needs_frames: bool, must_verify: bool) -> CachedSamples | None:
    """The samples of all lines but the last LEAST_ADDED_BYTES. They come from the cache, to which missing lines are added.

    needs_frames: whether frames are needed, and not only the header. must_verify: whether to compare the SHA-256 of the lines
    also if the file has the same size and time as when it was cached. None: all lines must be decoded, because they are few, or
    because the packages of frames are not installed. Raises OSError if the lines cannot be read."""
    if sample_lines.file_bytes < LEAST_CACHED_BYTES:
        return None
    lines_state = sample_lines.read_state()
    cached_samples = _load_cached_samples(sample_lines, lines_state, needs_frames=needs_frames, must_verify=must_verify)
    has_frame_packages = all(map(importlib.util.find_spec, ("numpy", "polars")))
    if not has_frame_packages or lines_state.bytes - (cached_samples.header.end if cached_samples else 0) < LEAST_ADDED_BYTES:
        return cached_samples
    if cached_samples is not None and cached_samples.frames is None:
        cached_samples = _load_cached_samples(sample_lines, lines_state, needs_frames=True, must_verify=False)
    return _extend_cached_samples(sample_lines, lines_state, cached_samples)


def _load_cached_samples(
    sample_lines: SampleLines, lines_state: LinesFileState, *, needs_frames: bool, must_verify: bool
) -> CachedSamples | None:
    """The samples in the cache; None if the cache has no samples of these lines. Raises OSError if the lines cannot be read."""
    try:
        cache_path = _find_cache_folder() / lines_state.path_sha256
        cache_content = memoryview(files.read(cache_path, MOST_CACHE_BYTES))
        header_end = bytes(cache_content[: 1 << 16]).index(b"\n", _DIGEST_CHARACTERS)
        header = get_decoder(CacheHeader).decode(cache_content[_DIGEST_CHARACTERS:header_end])
    except (OSError, WorkspaceError, RuntimeError, ValueError, *DECODE_FAULTS):
        return None
    is_intact = hashlib.sha256(cache_content[_DIGEST_CHARACTERS:]).hexdigest().encode() == cache_content[:_DIGEST_CHARACTERS]
    matches_lines = header.lines.path_sha256 == lines_state.path_sha256 and header.code == _compute_code_digest()
    if not is_intact or not matches_lines or header.end > lines_state.bytes:
        return None
    if (must_verify or header.lines != lines_state) and sample_lines.hash_beginning(header.end).hexdigest() != header.sha256:
        return None
    table_ranges = itertools.pairwise(itertools.accumulate(header.tables, initial=header_end + 1))
    parquet_tables = [bytes(cache_content[table_begin:table_end]) for table_begin, table_end in table_ranges]
    sample_frames = None
    if needs_frames:
        from collect.sources import samples

        if (sample_frames := samples.decode_parquet(parquet_tables)) is None:
            return None
    if header.lines != lines_state:
        header = msgspec.structs.replace(header, lines=lines_state)
        _store_cache_file(header, parquet_tables)
    with contextlib.suppress(OSError):
        os.utime(cache_path)  # the time of the last use
    return CachedSamples(header, sample_frames)


def _extend_cached_samples(
    sample_lines: SampleLines, lines_state: LinesFileState, cached_samples: CachedSamples | None
) -> CachedSamples | None:
    """Decode the whole lines that the cache lacks, and store all in the cache. Raises OSError if they cannot be read."""
    from collect.sources import samples

    begin_byte, corrupt_line_count, last_wall_s = 0, 0, 0.0
    sample_parts: list[Samples] = []
    if cached_samples is not None and cached_samples.frames is not None:
        header = cached_samples.header
        begin_byte, corrupt_line_count, last_wall_s = header.end, header.corrupt, header.last_wall_s
        sample_parts.append(cached_samples.frames)
    end_byte, lines_digest = begin_byte, sample_lines.hash_beginning(begin_byte)
    for lines_block in sample_lines.read_blocks(begin_byte, lines_state.bytes):
        decoded_lines = decode_records(lines_block, Sample)
        lines_digest.update(lines_block)
        end_byte, corrupt_line_count = end_byte + len(lines_block), corrupt_line_count + decoded_lines.corrupt
        last_wall_s = decoded_lines.records[-1].wall_s if decoded_lines.records else last_wall_s
        sample_parts.append(samples.build_sample_part([{"": decoded_lines.records}]))
    if end_byte == begin_byte:  # the last line is very long and incomplete
        return cached_samples
    sample_frames = samples.join_parts(sample_parts)
    parquet_tables = samples.encode_parquet(sample_frames)
    table_bytes, code = [len(table) for table in parquet_tables], _compute_code_digest()
    header = CacheHeader(code, lines_state, end_byte, lines_digest.hexdigest(), corrupt_line_count, last_wall_s, table_bytes)
    _store_cache_file(header, parquet_tables)
    return CachedSamples(header, sample_frames)


def _store_cache_file(header: CacheHeader, parquet_tables: list[bytes]) -> None:
    """Write a file of the cache, unless it cannot be written. A file that is larger than the whole cache may be is not kept."""
    cache_content = b"".join([msgspec.json.encode(header), b"\n", *parquet_tables])
    with contextlib.suppress(OSError, WorkspaceError, RuntimeError):
        cache_path = _find_cache_folder() / header.lines.path_sha256
        files.write_atomic(
            cache_path, hashlib.sha256(cache_content).hexdigest().encode() + cache_content, sync=False, mode=0o600
        )
        _remove_least_used_files(cache_path.parent)


def _remove_least_used_files(cache_folder: Path) -> None:
    """Remove the least recently used files, until the cache has at most MOST_CACHE_BYTES. Raises OSError."""
    with os.scandir(cache_folder) as cache_entries:
        statuses = [(cache_entry.stat(follow_symlinks=False), cache_entry.path) for cache_entry in cache_entries]
    files_by_use = sorted(((status.st_mtime_ns, status.st_size, file_path) for status, file_path in statuses), reverse=True)
    total_bytes = 0
    for _, file_bytes, file_path in files_by_use:
        total_bytes += file_bytes
        if total_bytes > MOST_CACHE_BYTES:
            Path(file_path).unlink(missing_ok=True)


def _find_cache_folder() -> Path:
    """The folder of the cache, which only this user can open. It is made if it does not exist.

    Raises OSError, WorkspaceError or RuntimeError if it cannot be made, or would be in a folder of another user, as in a
    command that was started with sudo.
    """
    cache_folder = own_folder.make_cache_path("telemetry")
    if next(parent_folder for parent_folder in cache_folder.parents if parent_folder.exists()).stat().st_uid != os.geteuid():
        raise PermissionError(f"{cache_folder}: is in a folder of another user")
    files.make_folder(cache_folder.parent)
    return own_folder.make_own_folder(cache_folder.parent, cache_folder.name)


@cache
def _compute_code_digest() -> str:
    """The digest of the source that decodes lines and makes frames."""
    return source_digest.digest_packages(("collect", "shardlab"))
