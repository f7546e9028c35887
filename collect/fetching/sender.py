"""Sends the runs of this workspace to another machine. `collect fetch` on that machine starts this program over SSH.

    python -m collect.fetching.sender --workspace DIR

Standard input and standard output: the messages of shardlab.transfer.messages. Each file is read once: it is hashed while it is
sent. The program then writes the manifest of each run, as `collect fetch` on this machine would do.
"""

from __future__ import annotations

import contextlib
import sys
from io import BufferedIOBase
from typing import BinaryIO

from collect.fetching import fetch_matrices, fetched_run, node_parts, side_by_side
from collect.fetching.progress import TransferProgress
from shardlab.errors import InputError, WorkspaceError
from shardlab.files import gc_pause
from shardlab.files.files import NotRegular
from shardlab.runs.rundir import RunDir
from shardlab.terminal import console
from shardlab.transfer import manifest
from shardlab.transfer.arrival import StandardInputReceiver
from shardlab.transfer.file_sender import FileSender
from shardlab.transfer.manifest import FolderListing, ManifestFile, RunManifest
from shardlab.transfer.messages import AskedRuns, OfferedRun, RunEnd, RunOffers, WantedRun, WantedRuns
from shardlab.workspace.workspace import Workspace


class Sender(FileSender):
    """Sends runs of one workspace. The messages are in shardlab.transfer.messages."""

    def __init__(self, workspace: Workspace, source: BufferedIOBase, target: BinaryIO) -> None:
        """source, target: the stream from which messages are read, and the stream to which messages are written."""
        super().__init__(lambda content: (target.write(content), target.flush()))
        self._workspace, self._source = workspace, StandardInputReceiver(source)

    def serve(self) -> None:
        """Offer runs and send those that are wanted. Raises InputError if a pattern matches no run, or a message is not
        valid."""
        offered_runs = self._offer_runs(self._source.receive(AskedRuns).patterns)
        wanted_runs = self._source.receive(WantedRuns)
        for run in wanted_runs.runs:
            if run.run not in offered_runs:
                raise InputError(f"{run.run!r} was not offered.")
            self.send_run(offered_runs[run.run], run, is_shared=wanted_runs.is_shared)
        self.flush_output()

    def _offer_runs(self, patterns: list[str]) -> dict[str, OfferedRun]:
        matching_ids = self._workspace.match_runs(patterns) if patterns else self._workspace.list_runs()
        part_sentences = node_parts.gather_if_needed(self._workspace, matching_ids, TransferProgress())
        self.send_message(RunOffers(len(matching_ids), fetch_matrices.read_matrices(self._workspace)))

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
            self.send_message(run)
        self.flush_output()
        return offered_runs

    def send_run(self, offer: OfferedRun, wanted_run: WantedRun, *, is_shared: bool) -> None:
        """Send the wanted files of a run, and write its manifest if it has none. A file that cannot be sent is named in the
        RunEnd message.

        is_shared: whether the content of the files is not sent, because the other machine reads it itself.
        """
        run, problems = self._run_folder(offer.run), list[str]()
        sent_files: dict[str, ManifestFile] = {}
        listing = FolderListing()
        try:
            listing = manifest.list_files(run.path)
        except WorkspaceError as error:
            problems.append(str(error))
        problems += [
            f"{name}: it is {entry_kind}" for name, entry_kind in listing.other_kinds.items() if name not in offer.not_regular
        ]
        for name in listing.status_by_file if wanted_run.names is None else wanted_run.names:
            old_file = offer.manifest.files.get(name) if offer.manifest else None
            try:
                if name not in listing.status_by_file:
                    raise FileNotFoundError
                status = listing.status_by_file[name]
                sent_files[name] = file = self.send_file(
                    f"{run.path}/{name}",
                    name,
                    status.st_size,
                    status.st_mtime_ns,
                    wanted_run.held.get(name),
                    is_shared=is_shared,
                )
                if old_file and old_file.sha256 != file.sha256 and not manifest.only_appended(run.path / name, old_file):
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
        self.send_message(RunEnd(new_manifest, problems))
        if new_manifest and not problems and not offer.problems and not offer.pruned:
            self.flush_output()  # so that the other machine goes on while the cluster waits for its own disk
            with contextlib.suppress(WorkspaceError):  # e.g. the disk is full: the run can be sent without a manifest here
                manifest.write_manifest(run, new_manifest)

    def _run_folder(self, run_id: str) -> RunDir:
        return RunDir(self._workspace.runs / run_id)


def main() -> int:
    """Send runs to the machine at the other end of standard input and standard output, and return the exit code."""
    arguments = console.Parser(prog="python -m collect.fetching.sender", parents=[console.common_options()]).parse_args()
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    with open(0, "rb", closefd=False) as source, open(1, "wb", closefd=False) as target, gc_pause.pause_collector():
        Sender(workspace, source, target).serve()
    return 0


if __name__ == "__main__":
    sys.exit(console.run_command(main))
