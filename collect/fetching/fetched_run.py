"""Writes the manifest of one run, or compares the run with the manifest of an earlier fetch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from collect.fetching import pruning
from collect.loading.records import NO_FOLDER_STATE, RunRecords
from shardlab.errors import InputError, WorkspaceError
from shardlab.runs.rundir import RunDir
from shardlab.runs.state import FINAL_STATES
from shardlab.transfer import manifest
from shardlab.transfer.manifest import RunManifest


class DownloadedRun(msgspec.Struct):
    """The result of downloading one run."""

    state: str
    hashed: int = 0
    """Number of files that were hashed to check them."""
    problems: list[str] = []
    """How the run on this machine differs from the run on the cluster."""
    not_regular: dict[str, str] = {}
    """Name of an entry that is neither a regular file nor a folder -> its kind."""
    parts: list[str] = []
    """Sentences: which node's part of the run is missing, or differs from the files of the first node."""
    new_manifest: RunManifest | None = None
    """The manifest that this command has just written, if it made the run folder and hashed all its files while they arrived.
    """


class Freed(msgspec.Struct, omit_defaults=True):
    """The files of a run that `--prune` removed in one place."""

    run: str
    """The run id."""
    where: str
    """The host of the cluster, or the node."""
    files: int = 0
    """Number of files that were removed."""
    bytes: int = 0
    """Size of these files in bytes."""
    why: str = ""
    """The reason if files of the run were not removed; '' if all were removed."""


class FetchedRun(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One run after it was fetched."""

    run: str
    """The run id."""
    state: str
    complete: bool
    """Whether the run has ended and all its parts are here, so that its files should not change any more."""
    files: int
    """Number of files in the manifest of the run."""
    bytes: int
    """Size of these files in bytes."""
    hashed: int
    """Number of files that were hashed by this command."""
    truncated: int
    """Number of files whose last line is incomplete."""
    corrupt: int
    """Number of lines that cannot be read."""
    damage: str = ""
    """The damage of the run's records in words."""
    unreadable: str = ""
    """The reason if the state of the run is not known."""
    added: list[str] = []
    """Names of files that are not in the manifest of the run."""
    problems: list[str] = []
    """How the run differs from its manifest or from the run on the cluster, one clause per difference."""
    not_regular: dict[str, str] = {}
    """Name of an entry that is neither a regular file nor a folder -> its kind; not fetched."""
    parts: list[str] = []
    """Sentences: which node's part of the run is missing, or differs from the files of the first node."""
    pruned: bool = False
    """Whether `--prune` removed files of the run here, because another machine has them."""
    freed: list[Freed] = []
    """The files that `--prune` removed on the cluster or its nodes."""

    @property
    def is_sound(self) -> bool:
        """Whether all files of the run are here and match its manifest, and its state could be read."""
        return not self.problems and not self.not_regular and not self.unreadable and not self.parts


def fetch_run(run_dir: RunDir, downloaded_run: DownloadedRun | None = None, part_sentences: Sequence[str] = ()) -> FetchedRun:
    """Write the manifest of a run, or compare the run with the manifest of an earlier fetch. Differences are in `problems`.

    If the run no longer matches an earlier manifest, the manifest is not changed, because it shows what the run was before.

    downloaded_run: the result of downloading the run if the cluster is remote. part_sentences: sentences about nodes' parts of
    the run that are missing or differ (`FetchedRun.parts`)."""
    return check_run(run_dir, downloaded_run, part_sentences)[0]


def check_run(
    run_dir: RunDir, downloaded_run: DownloadedRun | None = None, part_sentences: Sequence[str] = (), *, is_offer: bool = False
) -> tuple[FetchedRun, RunManifest | None]:
    """Do what `fetch_run` does. Returns (the run, the content of its manifest.json).

    is_offer: whether the run is on the cluster and will be sent. Then telemetry is not read, because the other machine reads
    it; and if the run has no manifest of an earlier fetch, its files are only counted, and the second value is None, because
    the caller hashes the files later.
    """
    records = RunRecords.read(run_dir, "open" if is_offer else "read")
    judged_state, record_damage = records.verdict.state, records.damage
    fetched_run = FetchedRun(
        run=run_dir.run_id,
        state=downloaded_run.state if downloaded_run and records.verdict == NO_FOLDER_STATE else judged_state,
        complete=judged_state in FINAL_STATES and not records.was_requeued and not part_sentences,
        parts=list(part_sentences),
        files=0,
        bytes=0,
        hashed=downloaded_run.hashed if downloaded_run else 0,
        truncated=len(record_damage.truncated),
        corrupt=record_damage.corrupt_line_count,
        damage=record_damage.describe(),
        unreadable=records.unreadable,
        pruned=pruning.is_pruned(run_dir),
    )
    if downloaded_run:
        fetched_run.problems, fetched_run.not_regular = downloaded_run.problems, downloaded_run.not_regular
        if downloaded_run.problems:
            return fetched_run, None
        if (new_manifest := downloaded_run.new_manifest) is not None and (new_manifest.complete or not fetched_run.complete):
            _set_totals(fetched_run, new_manifest)
            return fetched_run, new_manifest
    try:
        run_listing = manifest.list_files(run_dir.path)
        fetched_run.not_regular = {**fetched_run.not_regular, **run_listing.other_kinds}
        earlier_manifest = manifest.read_manifest(run_dir)
        if earlier_manifest is None or not earlier_manifest.complete:
            if is_offer:
                file_sizes = [file.st_size for file in run_listing.status_by_file.values()]
                fetched_run.files, fetched_run.bytes = len(file_sizes), sum(file_sizes)
                return fetched_run, None
            hashed_manifest = earlier_manifest if downloaded_run else None
            current_manifest = manifest.make_manifest(
                run_dir, run_listing, is_complete=fetched_run.complete, earlier_manifest=hashed_manifest
            )
            fetched_run.hashed += 0 if downloaded_run else len(current_manifest.files)
        else:
            current_manifest, difference = manifest.compare_with_manifest(run_dir, run_listing, earlier_manifest)
            fetched_run.hashed += difference.hashed_count
            if fetched_run.pruned:
                difference.vanished = [name for name in difference.vanished if pruning.is_kept_by_cluster(name)]
            fetched_run.added, fetched_run.problems = difference.added, difference.problem_clauses
        _set_totals(fetched_run, current_manifest)
        if current_manifest == earlier_manifest or fetched_run.problems or fetched_run.pruned:
            return fetched_run, earlier_manifest
        manifest.write_manifest(run_dir, current_manifest)
        return fetched_run, current_manifest
    except (InputError, WorkspaceError) as error:
        fetched_run.problems = [str(error)]
        return fetched_run, None


def _set_totals(fetched_run: FetchedRun, run_manifest: RunManifest) -> None:
    fetched_run.files, fetched_run.bytes = len(run_manifest.files), sum(file.bytes for file in run_manifest.files.values())
