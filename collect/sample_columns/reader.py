"""Reads files of samples, and uses the columns beside them where these repeat the same lines.

HOST.jsonl is what counts. A segment of HOST.columns replaces the decoding of its lines only if the lines have the digest of the
segment. All other lines are decoded, so records, damage and their order are the same with and without columns.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from collect.sample_columns.segment import LEAST, MAGIC, MOST_LINE, Digest, ReadSegment, SegmentFault, read_line
from shardlab.errors import WorkspaceError
from shardlab.files import files
from shardlab.runs.part_files import COLUMNS
from shardlab.runs.record import RecordLines, Sample, decode_lines

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

BLOCK = 4 << 20  # bytes of JSON that are decoded at a time, because records need several times more memory
HASHED = 1 << 18  # bytes that are hashed at a time: they stay in the cache of a processor core
MOST_THREADS = 8
USUAL_LINE = 1 << 14  # the usual size of the line of JSON of a segment is a third of this
MOST_FAULTS = 100  # a file of columns with more damaged places is not read on; a sampler leaves at most one at each start

Built = TypeVar("Built")


class BuiltSegment(NamedTuple, Generic[Built]):
    """What was built from a segment whose digest is right."""

    built: Built
    last_wall_s: float
    """The time of its last sample."""


class FileEnd(NamedTuple):
    """All pieces of a file were read."""

    error: WorkspaceError | None
    """Why the file could not be read, or not to its end; None if it was read."""


def read(
    paths: Sequence[str], build: Callable[[ReadSegment, bytes], Built]
) -> Iterator[tuple[str, RecordLines[Sample] | BuiltSegment[Built] | FileEnd]]:
    """Read the files of samples of a run, piece by piece, in the order of `paths` and of their lines. The last piece of each
    file is a `FileEnd`. A file that does not exist has no other pieces.

    build: makes something of a segment with its values. It is called in several threads, and raises SegmentFault if a value is
    not allowed; the lines of the segment are then decoded.
    """
    from concurrent.futures import ThreadPoolExecutor  # a small fetch imports this module and reads no samples

    threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
    ahead: deque[_OpenFile[Built]] = deque()  # while one file is read, threads check segments of the next files
    with ThreadPoolExecutor(threads, "columns") as pool:  # it starts no thread before it has work
        try:
            waiting = iter(paths)
            while True:
                ahead += [_OpenFile(path, pool, build) for path in itertools.islice(waiting, threads + 1 - len(ahead))]
                if not ahead:
                    return
                file, error = ahead[0], None
                try:
                    for piece in file.pieces():
                        yield file.path, piece
                except OSError as fault:
                    error = WorkspaceError.from_os_error(fault, "read")
                    error.__cause__ = fault
                ahead.popleft().close()
                yield file.path, FileEnd(error)
        finally:
            for file in ahead:
                file.close()


class _OpenFile(Generic[Built]):
    """A file of samples that is being read, and the segments of the columns beside it."""

    def __init__(self, path: str, pool: ThreadPoolExecutor, build: Callable[[ReadSegment, bytes], Built]) -> None:
        self.path = path
        self._error: OSError | None = None
        self._descriptor = self._columns = -1  # descriptors of the file, and of the file of columns; -1: it is not open
        self._segments: list[tuple[ReadSegment, Future[BuiltSegment[Built]]]] = []
        try:
            self._descriptor, self._size = files.open_descriptor(path)
        except OSError as error:
            self._error = error
            return
        if self._size >= LEAST:
            self._find_columns(pool, build)

    def close(self) -> None:
        """Close the files, when no thread uses them any more."""
        for _, future in self._segments:
            if not future.cancel():
                future.exception()
        for descriptor in (self._descriptor, self._columns):
            if descriptor >= 0:
                os.close(descriptor)

    def _find_columns(self, pool: ThreadPoolExecutor, build: Callable[[ReadSegment, bytes], Built]) -> None:
        """Start to check the segments of the file of columns, if there is one."""
        try:
            self._columns, size = files.open_descriptor(self.path.removesuffix(".jsonl") + COLUMNS)
            end = 0
            for at, segment in read_segments(self._columns, size):
                # Segments that overlap, or are out of order, would be hashed again and again; no sampler writes them.
                if end <= segment.begin and segment.end <= self._size:
                    end = segment.end
                    self._segments.append((segment, pool.submit(self._build_segment, segment, at, build)))
        except OSError:  # no file, or no regular file, or it cannot be read: the lines are decoded
            return

    def pieces(self) -> Iterator[RecordLines[Sample] | BuiltSegment[Built]]:
        """The pieces of the file in the order of their lines. Raises OSError."""
        if isinstance(self._error, FileNotFoundError):
            return
        if self._error is not None:
            raise self._error
        done = 0
        for segment, future in self._segments:
            try:
                built = future.result()
            except (SegmentFault, OSError):
                continue
            yield from self._decode_between(done, segment.begin)
            yield built
            done = segment.end
        yield from self._decode_between(done, None)

    def _decode_between(self, begin: int, end: int | None) -> Iterator[RecordLines[Sample]]:
        """The records between two places at which lines begin. end: None for the end of the file."""
        rest: list[bytes] = []  # the beginning of a line whose end is in a later block
        while end is None or begin < end:
            # One byte more than the file has: fewer bytes than asked for are the end of the file.
            read_size = min(BLOCK, end - begin if end is not None else self._size - begin + 1 if begin <= self._size else BLOCK)
            block = os.pread(self._descriptor, read_size, begin)
            begin += len(block)
            cut = block.rfind(b"\n") + 1
            if cut:
                yield decode_lines(b"".join([*rest, block[:cut]]), Sample)
                rest = []
            rest.append(block[cut:])
            if len(block) < read_size:
                break
        if any(rest):
            yield decode_lines(b"".join(rest), Sample)

    def _build_segment(
        self, segment: ReadSegment, offset: int, build: Callable[[ReadSegment, bytes], Built]
    ) -> BuiltSegment[Built]:
        """Check the digest of a segment, and call `build`. offset: the place of its values. Raises SegmentFault, OSError."""
        if segment.begin and os.pread(self._descriptor, 1, segment.begin - 1) != b"\n":
            raise SegmentFault("it begins within a line")
        digest, place, block = Digest(), segment.begin, memoryview(bytearray(HASHED))
        while place < segment.end:
            count = os.preadv(self._descriptor, [block[: segment.end - place]], place)
            if not count:
                raise SegmentFault("the file has become shorter")
            digest.add_lines(block[:count])
            place += count
        if block[count - 1] != 10:  # a line break
            raise SegmentFault("it ends within a line")
        values = os.pread(self._columns, segment.size, offset)
        if digest.finish(segment.hashed, values) != segment.sha256:
            raise SegmentFault("the digest is another one")
        last_wall_s = segment.last_wall_s(values)
        if not math.isfinite(last_wall_s):
            raise SegmentFault("a time that JSON cannot have")
        return BuiltSegment(build(segment, values), last_wall_s)


def read_segments(descriptor: int, size: int) -> Iterator[tuple[int, ReadSegment]]:
    """The segments of a file of columns, in the order of the file: (place of its values, the segment).

    size: the size of the file. A segment is left out if its line is damaged, or if its values are not followed by the end of
    the file or by another segment: then a sampler was killed while it wrote the segment. Raises OSError.
    """
    place, faults = 0, 0
    while (place := _find_segment(descriptor, place, size)) < size and faults < MOST_FAULTS:
        line = os.pread(descriptor, USUAL_LINE, place)
        if (end := line.find(b"\n", 1)) < 0:
            line = os.pread(descriptor, MOST_LINE, place)
            end = line.find(b"\n", 1)
        try:
            segment = read_line(line[1:end] if end > 0 else b"")
            after = place + end + 1 + segment.size
            if after > size or not MAGIC.startswith(os.pread(descriptor, len(MAGIC), after)):
                raise SegmentFault("its values are not complete")
        except SegmentFault:
            faults += 1
            place += 1
            continue
        yield place + end + 1, segment
        place = after


def _find_segment(descriptor: int, offset: int, size: int) -> int:
    """The first place, from `offset` on, at which a segment may begin; `size` if there is none."""
    read_size = len(MAGIC)  # the usual case: a segment begins exactly here
    while len(block := os.pread(descriptor, read_size, offset)) >= len(MAGIC):
        if (position := block.find(MAGIC)) >= 0:
            return offset + position
        offset += len(block) - len(MAGIC) + 1
        read_size = MOST_LINE
    return size
