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


class RunSender(FileSender):
    """Sends runs of one workspace. The messages are in shardlab.transfer.messages."""

    def __init__(self, workspace: Workspace, input_stream: BufferedIOBase, output_stream: BinaryIO) -> None:
        """source, output_stream: the stream from which messages are read, and the stream to which messages are written."""
        super().__init__(lambda content: (output_stream.write(content), output_stream.flush()))
        self._workspace, self._input = workspace, StandardInputReceiver(input_stream)

    def serve_requests(self) -> None:
        """Offer runs and send those that are wanted. Raises InputError if a pattern matches no run, or a message is not
        valid."""
        offered_runs = self._offer_runs(self._input.receive(AskedRuns).patterns)
        wanted_runs = self._input.receive(WantedRuns)
        for wanted_run in wanted_runs.runs:
            if wanted_run.run not in offered_runs:
                raise InputError(f"{wanted_run.run!r} was not offered.")
            self.send_run(offered_runs[wanted_run.run], wanted_run, is_shared=wanted_runs.is_shared)
        self.flush_output()

    def _offer_runs(self, patterns: list[str]) -> dict[str, OfferedRun]:
        matching_ids = self._workspace.match_runs(patterns) if patterns else self._workspace.list_run_ids()
        part_sentences = node_parts.gather_parts_if_needed(self._workspace, matching_ids, TransferProgress())
        self.send_message(RunOffers(len(matching_ids), fetch_matrices.read_matrix_descriptions(self._workspace)))

        def offer_run(run_id: str) -> OfferedRun:
            checked_run, run_manifest = fetched_run.check_run(
                self._get_run_dir(run_id), None, part_sentences.get(run_id, []), is_offer=True
            )
            return OfferedRun(
                run=run_id, state=checked_run.state, complete=checked_run.complete, bytes=checked_run.bytes,
                manifest=run_manifest, problems=checked_run.problems, not_regular=checked_run.not_regular,
                parts=checked_run.parts, pruned=checked_run.pruned,
            )  # fmt: skip

        offered_runs = {}
        for checked_run in side_by_side.map_in_threads(offer_run, matching_ids):
            offered_runs[checked_run.run] = checked_run
            self.send_message(checked_run)
        self.flush_output()
        return offered_runs

    def send_run(self, offer: OfferedRun, wanted_run: WantedRun, *, is_shared: bool) -> None:
        """Send the wanted files of a run, and write its manifest if it has none. A file that cannot be sent is named in the
        RunEnd message.

        is_shared: whether the content of the files is not sent, because the other machine reads it itself.
        """
        run, problems = self._get_run_dir(offer.run), list[str]()
        sent_files: dict[str, ManifestFile] = {}
        run_listing = FolderListing()
        try:
            run_listing = manifest.list_files(run.path)
        except WorkspaceError as error:
            problems.append(str(error))
        problems += [
            f"{name}: it is {entry_kind}"
            for name, entry_kind in run_listing.other_kinds.items()
            if name not in offer.not_regular
        ]
        for name in run_listing.status_by_file if wanted_run.names is None else wanted_run.names:
            old_file = offer.manifest.files.get(name) if offer.manifest else None
            try:
                if name not in run_listing.status_by_file:
                    raise FileNotFoundError
                file_status = run_listing.status_by_file[name]
                sent_files[name] = sent_file = self.send_file(
                    f"{run.path}/{name}",
                    name,
                    file_status.st_size,
                    file_status.st_mtime_ns,
                    wanted_run.held.get(name),
                    is_shared=is_shared,
                )
                if old_file and old_file.sha256 != sent_file.sha256 and not manifest.only_appended(run.path / name, old_file):
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

    def _get_run_dir(self, run_id: str) -> RunDir:
        return RunDir(self._workspace.runs / run_id)


def main() -> int:
    """Send runs to the machine at the other end of standard input and standard output, and return the exit code."""
    arguments = console.Parser(prog="python -m collect.fetching.sender", parents=[console.common_options()]).parse_args()
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    with open(0, "rb", closefd=False) as input_stream, open(1, "wb", closefd=False) as target, gc_pause.pause_collector():
        RunSender(workspace, input_stream, target).serve_requests()
    return 0


if __name__ == "__main__":
    sys.exit(console.run_command(main))
