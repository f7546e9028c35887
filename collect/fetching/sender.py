"""Sends the runs of this workspace to another machine. `collect fetch` on that machine starts this program over SSH.

    python -m collect.fetching.sender --workspace DIR

Standard input and standard output: the messages of collect.fetching.messages. Each file is read once: it is hashed while it is
sent. The program then writes the manifest of each run, as `collect fetch` on this machine would do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import zstandard

from collect.fetching import fetch_matrices, fetched_run, manifest, node_parts, side_by_side
from collect.fetching.manifest import Listing, ManifestFile, RunManifest
from collect.fetching.messages import (
    BLOCK_BYTES,
    BLOCK_LENGTH,
    AskedRuns,
    FileBegin,
    HeldFile,
    OfferedRun,
    RunEnd,
    RunOffers,
    WantedRun,
    WantedRuns,
)
from collect.fetching.progress import TransferProgress
from shardlab.errors import InputError, WorkspaceError
from shardlab.files import files, gc_pause, json_file
from shardlab.files.files import NotRegular
from shardlab.runs.rundir import RunDir
from shardlab.terminal import console
from shardlab.workspace.workspace import Workspace

# Names of files that contain text, which is compressed. Other files of a run, such as traces, are compressed already.
TEXT_SUFFIXES = (".jsonl", ".json", ".log", ".out", ".err", ".txt", ".yaml", ".sh", ".sbatch", ".csv")
ZSTD_LEVEL = 1  # how thoroughly zstd compresses: higher levels need more time and make records no smaller
MOST_WAITING_BYTES = BLOCK_BYTES  # bytes that are written at once: a run may have thousands of small files
# the most bytes of a block of a large file that is copied, to be written together with other blocks
MOST_COPIED_BYTES = 1 << 15

T = TypeVar("T")


class Sender:
    """Sends runs of one workspace. The messages are in collect.fetching.messages."""

    def __init__(self, workspace: Workspace, source: BinaryIO, target: BinaryIO) -> None:
        """source, target: the stream from which messages are read, and the stream to which messages are written."""
        self._workspace, self._source, self._target = workspace, source, target
        self._encoder = msgspec.json.Encoder()
        self._unwritten: list[bytes] = []  # what is not yet written to `target`
        self._unwritten_bytes = 0  # size of `_unwritten` in bytes
        self._memory = memoryview(bytearray(BLOCK_BYTES))  # the block of a file that is being sent
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)

    def serve(self) -> None:
        """Offer runs and send those that are wanted. Raises InputError if a pattern matches no run, or a message is not
        valid."""
        offered_runs = self._offer_runs(self._receive_message(AskedRuns).patterns)
        wanted_runs = self._receive_message(WantedRuns)
        for run in wanted_runs.runs:
            if run.run not in offered_runs:
                raise InputError(f"{run.run!r} was not offered.")
            self.send_run(offered_runs[run.run], run, is_shared=wanted_runs.is_shared)
        self._flush_output()

    def _offer_runs(self, patterns: list[str]) -> dict[str, OfferedRun]:
        matching_ids = self._workspace.match_runs(patterns) if patterns else self._workspace.run_ids()
        part_sentences = node_parts.gather_if_needed(self._workspace, matching_ids, TransferProgress())
        self._send_message(RunOffers(len(matching_ids), fetch_matrices.read_matrices(self._workspace)))

        def offer_run(run_id: str) -> OfferedRun:
            run, run_manifest = fetched_run.check_run(
                self._run_folder(run_id), None, part_sentences.get(run_id, []), is_offer=True
            )
            return OfferedRun(
                run=run_id, state=run.state, complete=run.complete, bytes=run.bytes, manifest=run_manifest,
                problems=run.problems, not_regular=run.not_regular, parts=run.parts, pruned=run.pruned,
            )  # fmt: skip

        offered_runs = {}
        for run in side_by_side.map_in_threads(offer_run, matching_ids):
            offered_runs[run.run] = run
            self._send_message(run)
        self._flush_output()
        return offered_runs

    def send_run(self, offer: OfferedRun, wanted_run: WantedRun, *, is_shared: bool) -> None:
        """Send the wanted files of a run, and write its manifest if it has none. A file that cannot be sent is named in the
        RunEnd message.

        is_shared: whether the content of the files is not sent, because the other machine reads it itself.
        """
        run, problems = self._run_folder(offer.run), list[str]()
        sent_files: dict[str, ManifestFile] = {}
        listing = Listing()
        try:
            listing = manifest.list_files(run.path)
        except WorkspaceError as error:
            problems.append(str(error))
        problems += [
            f"{name}: it is {entry_kind}" for name, entry_kind in listing.other.items() if name not in offer.not_regular
        ]
        for name in listing.regular if wanted_run.names is None else wanted_run.names:
            old_file = offer.manifest.files.get(name) if offer.manifest else None
            try:
                if name not in listing.regular:
                    raise FileNotFoundError
                sent_files[name] = file = self._send_file(
                    run.path, name, listing.regular[name], wanted_run.held.get(name), is_shared=is_shared
                )
                if old_file and old_file.sha256 != file.sha256 and not manifest.only_grew(run.path / name, old_file):
                    problems.append(f"{name}: its content changed")
            except FileNotFoundError:
                if old_file:  # else the run is still going on and removed the file
                    problems.append(f"{name}: the file is missing")
            except NotRegular as error:
                problems.append(f"{name}: it is {error.kind}")
            except BrokenPipeError:
                raise
            except OSError as error:
                problems.append(f"{name}: {WorkspaceError.from_os_error(error, 'read')}")
        new_manifest = None if offer.manifest else RunManifest(manifest.MANIFEST_SCHEMA, run.run_id, sent_files, offer.complete)
        self._send_message(RunEnd(new_manifest, problems))
        if new_manifest and not problems and not offer.problems and not offer.pruned:
            self._flush_output()  # so that the other machine goes on while the cluster waits for its own disk
            with contextlib.suppress(WorkspaceError):  # e.g. the disk is full: the run can be sent without a manifest here
                manifest.write_manifest(run, new_manifest)

    def _send_file(
        self, run: Path, name: str, file_status: os.stat_result, receiver_copy: HeldFile | None, *, is_shared: bool
    ) -> ManifestFile:
        """Send a file from where the other machine's copy ends. Returns the size and the digest of the file as it was sent.

        file_status: the status of the file before it is opened. Records that are appended later are not sent.
        """
        descriptor, _ = files.open_descriptor(f"{run}/{name}")
        try:
            file_bytes, begin_byte, digest = file_status.st_size, 0, hashlib.sha256()
            if receiver_copy is not None and receiver_copy.bytes <= file_bytes:
                for block in self._read_blocks(descriptor, 0, receiver_copy.bytes):
                    digest.update(block)
                    begin_byte += len(block)
                if begin_byte != receiver_copy.bytes or digest.hexdigest() != receiver_copy.sha256:
                    begin_byte, digest = 0, hashlib.sha256()
            if file_bytes and begin_byte == file_bytes:  # the other machine has the whole file
                return ManifestFile(file_bytes, file_status.st_mtime_ns, digest.hexdigest())
            is_compressed = name.endswith(TEXT_SUFFIXES)
            end = begin_byte
            if is_shared:
                for block in self._read_blocks(descriptor, begin_byte, file_bytes):
                    digest.update(block)
                    end += len(block)
                self._send_message(FileBegin(name, begin_byte, end, file_status.st_mtime_ns))
            elif (
                file_bytes - begin_byte <= BLOCK_BYTES
                and len(block := self._read_block(descriptor, begin_byte, file_bytes)) == file_bytes - begin_byte
            ):
                digest.update(block)
                end = file_bytes
                content = self._compressor.compress(block) if is_compressed else bytes(block)
                self._send_message(
                    FileBegin(name, begin_byte, file_bytes, file_status.st_mtime_ns, is_compressed, len(content))
                )
                self._write(content)
            else:
                self._send_message(FileBegin(name, begin_byte, file_bytes, file_status.st_mtime_ns, is_compressed))
                try:
                    for block in self._read_blocks(descriptor, begin_byte, file_bytes):
                        digest.update(block)
                        end += len(block)
                        self._send_block(self._compressor.compress(block) if is_compressed else block)
                finally:
                    self._send_block(b"")  # also if the file cannot be read further, so that the next message is understood
        finally:
            os.close(descriptor)
        return ManifestFile(end, file_status.st_mtime_ns, digest.hexdigest())

    def _read_blocks(self, descriptor: int, begin_byte: int, end_byte: int) -> Iterator[memoryview]:
        """The bytes of a file from `begin_byte` to `end_byte` in blocks; fewer bytes if the file has become shorter.

        A block is valid until the next block is taken: all blocks are read into the same memory, because new memory for each
        block would take longer than reading the block.
        """
        while begin_byte < end_byte and (block := self._read_block(descriptor, begin_byte, end_byte)):
            begin_byte += len(block)
            yield block

    def _read_block(self, descriptor: int, begin_byte: int, end_byte: int) -> memoryview:
        """The bytes of a file from `begin_byte` to `end_byte`, at most one block; fewer bytes if the file has become
        shorter."""
        return self._memory[: os.preadv(descriptor, [self._memory[: min(BLOCK_BYTES, end_byte - begin_byte)]], begin_byte)]

    def _run_folder(self, run_id: str) -> RunDir:
        return RunDir(self._workspace.runs / run_id)

    def _receive_message(self, message_type: type[T]) -> T:
        return json_file.decode_standard_input(self._source.readline(), message_type, "a message of this version")

    def _send_message(self, message: object) -> None:
        self._write(self._encoder.encode(message) + b"\n")

    def _send_block(self, block: bytes | memoryview) -> None:
        self._write(BLOCK_LENGTH.pack(len(block)))
        if len(block) > MOST_COPIED_BYTES:
            self._flush_output()
            self._write_through(block)
        else:
            self._write(bytes(block))

    def _write(self, content: bytes) -> None:
        self._unwritten.append(content)
        self._unwritten_bytes += len(content)
        if self._unwritten_bytes > MOST_WAITING_BYTES:
            self._flush_output()

    def _flush_output(self) -> None:
        self._write_through(b"".join(self._unwritten))
        self._unwritten, self._unwritten_bytes = [], 0

    def _write_through(self, content: bytes | memoryview) -> None:
        self._target.write(content)
        self._target.flush()


def main() -> int:
    """Send runs to the machine at the other end of standard input and standard output, and return the exit code."""
    arguments = console.Parser(prog="python -m collect.fetching.sender", parents=[console.common_options()]).parse_args()
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    with open(0, "rb", closefd=False) as source, open(1, "wb", closefd=False) as target, gc_pause.pause_collector():
        Sender(workspace, source, target).serve()
    return 0


if __name__ == "__main__":
    sys.exit(console.run_command(main))
