"""Bring the files of runs together and compare them with what was brought before.

The runs of a local cluster lie in the workspace already: what is left to do is to write down what they consist of. Those
of a cluster elsewhere are downloaded first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from collect import download, manifest, records
from collect.download import Downloaded
from shardlab.errors import InputError, WorkspaceError
from shardlab.rundir import RunDir
from shardlab.state import FINAL
from shardlab.workspace import Workspace, chosen


class Fetched(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One run after fetching.

    hashed: how many files were read for it. problems: why it is not what it was, or not what it is on the cluster, in clauses.
    not_regular: what it has beside files and folders, by name, such as "a symlink"; nothing of it was fetched or read.
    unreadable: why its state cannot be told, or "".
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

    @property
    def is_sound(self) -> bool:
        return not self.problems and not self.not_regular and not self.unreadable


def fetch(workspace: Workspace, patterns: Sequence[str], say: Callable[[str], None] = lambda _: None) -> list[Fetched]:
    """Every run whose id matches, or every run. Raises InputError for a pattern that matches none."""
    downloaded = download.download(workspace, patterns, say)
    known = sorted({*workspace.run_ids(), *downloaded})
    ids = chosen(known, patterns) if patterns else known
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # hashing and reading leave the interpreter's lock
        return list(pool.map(lambda run_id: fetch_run(RunDir(workspace.runs / run_id), downloaded.get(run_id)), ids))


def fetch_run(run: RunDir, downloaded: Downloaded | None = None) -> Fetched:
    """Make or check the manifest of one run. What is wrong with it is told in `problems`.

    A manifest that its run no longer agrees with is left as it is: it is the evidence.
    """
    found = records.read(run)
    state, damage = found.verdict.state, found.damage
    fetched = Fetched(
        run=run.run_id,
        state=downloaded.state if downloaded and found.verdict == records.NO_FOLDER else state,
        complete=state in FINAL and not found.waits,
        files=0,
        bytes=0,
        hashed=downloaded.hashed if downloaded else 0,
        truncated=len(damage.truncated),
        corrupt=damage.lines,
        damage=damage.says(),
        unreadable=found.unreadable,
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
            fetched.added, fetched.problems = difference.added, difference.problems
        if now != old and not fetched.problems:
            manifest.write(run, now)
    except (InputError, WorkspaceError) as error:
        fetched.problems = [str(error)]
        return fetched
    fetched.files, fetched.bytes = len(now.files), sum(file.bytes for file in now.files.values())
    return fetched
