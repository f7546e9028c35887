"""Offers the runs of this workspace to another machine, and hashes their files while that machine copies them with rsync.
`collect fetch` on that machine starts this program over SSH.

    python -m collect.fetching.sender --workspace DIR

Standard input and standard output: the messages of collect.fetching.messages. The program writes the manifest of each run that
has none, as `collect fetch` on this machine would do.
"""

from __future__ import annotations

import contextlib
import sys
from typing import BinaryIO, TypeVar

import msgspec

from collect.fetching import fetch_matrices, fetched_run, manifest, node_parts, side_by_side
from collect.fetching.manifest import Listing
from collect.fetching.messages import Asked, CheckedRun, ListedRun, OfferedRun, Offers, Wanted
from collect.fetching.progress import TransferProgress
from shardlab.errors import InputError, WorkspaceError
from shardlab.files import gc_pause, json_file
from shardlab.runs.rundir import RunDir
from shardlab.terminal import console
from shardlab.workspace.workspace import Workspace, match_run_ids

T = TypeVar("T")


class Sender:
    """Offers runs of one workspace. The messages are in collect.fetching.messages."""

    def __init__(self, workspace: Workspace, source: BinaryIO, target: BinaryIO) -> None:
        """source, target: the stream from which messages are read, and the stream to which messages are written."""
        self._workspace, self._source, self._target = workspace, source, target

    def serve(self) -> None:
        """Offer runs, and list and hash those that are wanted, until the input ends. Raises InputError if a pattern matches no
        run, or a message is not valid."""
        offered = self._offer_runs(self._decode(self._source.readline(), Asked).patterns)
        while line := self._source.readline():
            runs = []
            for run_id in self._decode(line, Wanted).runs:
                if run_id not in offered:
                    raise InputError(f"{run_id!r} was not offered.")
                listing = self._list_run(run_id)
                runs.append((offered[run_id], listing))
                self._send_message(ListedRun({name: status.st_size for name, status in listing.regular.items()}))
            self._target.flush()
            for checked in side_by_side.map_in_threads(self._check_run, runs):
                self._send_message(checked)
            self._target.flush()

    def _offer_runs(self, patterns: list[str]) -> dict[str, OfferedRun]:
        ids = match_run_ids(self._workspace.run_ids(), patterns) if patterns else self._workspace.run_ids()
        parts = node_parts.gather_if_needed(self._workspace, ids, TransferProgress())
        self._send_message(Offers(len(ids), fetch_matrices.read(self._workspace)))

        def offer(run_id: str) -> OfferedRun:
            run, run_manifest = fetched_run.check_run(self._run_folder(run_id), None, parts.get(run_id, []), is_offer=True)
            return OfferedRun(
                run=run_id, state=run.state, complete=run.complete, manifest=run_manifest,
                problems=run.problems, not_regular=run.not_regular, parts=run.parts, pruned=run.pruned,
            )  # fmt: skip

        offered = {}
        for run in side_by_side.map_in_threads(offer, ids):
            offered[run.run] = run
            self._send_message(run)
        self._target.flush()
        return offered

    def _list_run(self, run_id: str) -> Listing:
        try:
            return manifest.list_files(self._run_folder(run_id).path)
        except WorkspaceError:  # `_check_run` reports it
            return Listing()

    def _check_run(self, offered_and_listing: tuple[OfferedRun, Listing]) -> CheckedRun:
        """Hash the files of a run. If the run has no manifest, its manifest is made and written; otherwise, the run is compared
        with its manifest."""
        offered, listing = offered_and_listing
        run = self._run_folder(offered.run)
        try:
            if offered.manifest is not None:
                difference = manifest.compare(run, manifest.list_files(run.path), offered.manifest)[1]
                return CheckedRun(None, difference.problems)
            new_manifest = manifest.make(run, listing, complete=offered.complete)
            listing_after = manifest.list_files(run.path)
        except WorkspaceError as error:
            return CheckedRun(None, [str(error)])
        problems = [f"{name}: it is {kind}" for name, kind in listing_after.other.items() if name not in offered.not_regular]
        problems += [
            f"{name}: its content changed"
            for name in new_manifest.files
            if name in listing_after.regular and listing_after.regular[name].st_ino != listing.regular[name].st_ino
        ]
        if not problems and not offered.problems and not offered.pruned:
            with contextlib.suppress(WorkspaceError):  # e.g. the disk is full: the run can be sent without a manifest here
                manifest.write(run, new_manifest)
        return CheckedRun(new_manifest, problems)

    def _run_folder(self, run_id: str) -> RunDir:
        return RunDir(self._workspace.runs / run_id)

    def _decode(self, line: bytes, message_type: type[T]) -> T:
        return json_file.decode_standard_input(line, message_type, "a message of this version")

    def _send_message(self, message: object) -> None:
        self._target.write(msgspec.json.encode(message) + b"\n")


def main() -> int:
    """Send runs to the machine at the other end of standard input and standard output, and return the exit code."""
    arguments = console.Parser(prog="python -m collect.fetching.sender", parents=[console.common_options()]).parse_args()
    workspace = Workspace.find(getattr(arguments, "workspace", None))
    with open(0, "rb", closefd=False) as source, open(1, "wb", closefd=False) as target, gc_pause.pause_collector():
        Sender(workspace, source, target).serve()
    return 0


if __name__ == "__main__":
    sys.exit(console.run_command(main))
