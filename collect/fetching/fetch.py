"""Fetch the files of runs, write their manifests, and compare them with the manifests of an earlier fetch.

The runs of a local cluster are in the workspace already, so only their manifests are written. The runs of a remote cluster are
downloaded first. If each node has its own part of a run's folder, the first node gathers the parts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from collect.fetching import download, gather, manifest, removal
from collect.fetching.download import Downloaded
from collect.fetching.progress import TransferProgress
from collect.loading.records import NO_FOLDER, RunRecords
from shardlab.errors import InputError, WorkspaceError
from shardlab.rundir import RunDir
from shardlab.state import FINAL
from shardlab.workspace import Workspace, chosen


class Freed(msgspec.Struct, omit_defaults=True):
    """What `--prune` removed of a run in one place. where: the host or the node. why: why files of it stay there, or ''."""

    run: str
    where: str
    files: int = 0
    bytes: int = 0
    why: str = ""


class Fetched(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One run after fetching.

    hashed: how many files were hashed. problems: how the run differs from its manifest or from the run on the cluster, one
    clause for each difference. not_regular: maps the name of each entry that is neither a regular file nor a folder to its
    kind, such as "a symlink"; such entries are neither fetched nor read. unreadable: why the run's state is not known, or "".
    parts: if each node has its own part of the run's folder, what is missing of them, or contradicts the first node. pruned:
    files of the run were removed from this folder by `--prune`, which another machine has. freed: what `--prune` removed.
    """

    run: str
    state: str
    complete: bool
    files: int
    bytes: int
    hashed: int
    truncated: int
    corrupt: int
    damage: str = ""
    unreadable: str = ""
    added: list[str] = []
    problems: list[str] = []
    not_regular: dict[str, str] = {}
    parts: list[str] = []
    pruned: bool = False
    freed: list[Freed] = []

    @property
    def is_sound(self) -> bool:
        """The run is all here, agrees with its manifest, and its state could be read."""
        return not self.problems and not self.not_regular and not self.unreadable and not self.parts


def fetch(workspace: Workspace, patterns: Sequence[str], progress: TransferProgress) -> list[Fetched]:
    """Fetch every run whose id matches a pattern, or every run. Raises InputError for a pattern that matches no run."""
    downloaded = download.download(workspace, patterns, progress)
    known = sorted({*workspace.run_ids(), *downloaded})
    ids = chosen(known, patterns) if patterns else known
    parts = gather.gather(workspace, [run_id for run_id in ids if run_id not in downloaded], progress)
    parts |= {run_id: run.parts for run_id, run in downloaded.items()}

    def fetched(run_id: str) -> Fetched:
        return fetch_run(RunDir(workspace.runs / run_id), downloaded.get(run_id), parts.get(run_id, []))

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # hashing and reading leave the interpreter's lock
        return list(pool.map(fetched, ids))


def fetch_run(run: RunDir, downloaded: Downloaded | None = None, parts: Sequence[str] = ()) -> Fetched:
    """Make or check the manifest of one run. `problems` of the result lists the differences. parts: as in Fetched.

    If a run no longer agrees with its manifest, the manifest is not changed, because it is the evidence.
    """
    records = RunRecords.read(run)
    state, damage = records.verdict.state, records.damage
    fetched = Fetched(
        run=run.run_id,
        state=downloaded.state if downloaded and records.verdict == NO_FOLDER else state,
        complete=state in FINAL and not records.waits and not parts,
        parts=list(parts),
        files=0,
        bytes=0,
        hashed=downloaded.hashed if downloaded else 0,
        truncated=len(damage.truncated),
        corrupt=damage.lines,
        damage=damage.says(),
        unreadable=records.unreadable,
        pruned=removal.is_pruned(run),
    )
    if downloaded:
        fetched.problems, fetched.not_regular = downloaded.problems, downloaded.not_regular
        if downloaded.problems:
            return fetched
    try:
        listing = manifest.list_files(run)
        fetched.not_regular = {**fetched.not_regular, **listing.other}
        old = manifest.read(run)
        if old is None or not old.complete:
            now = manifest.make(run, listing, complete=fetched.complete, known=old if downloaded else None)
            fetched.hashed += 0 if downloaded else len(now.files)
        else:
            now, difference = manifest.compare(run, listing, old)
            fetched.hashed += difference.hashed
            if fetched.pruned:
                difference.vanished = [name for name in difference.vanished if removal.is_kept(name)]
            fetched.added, fetched.problems = difference.added, difference.problems
        if now != old and not fetched.problems and not fetched.pruned:
            manifest.write(run, now)
    except (InputError, WorkspaceError) as error:
        fetched.problems = [str(error)]
        return fetched
    fetched.files, fetched.bytes = len(now.files), sum(file.bytes for file in now.files.values())
    return fetched
