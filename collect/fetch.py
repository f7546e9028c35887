"""Bring the files of runs together and hold them against what was brought before.

The runs of a local cluster lie in the workspace already: what is left to do is to write down what they consist of. Those
of a cluster elsewhere are carried here first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from collect import carry, manifest, records
from shardlab.errors import InputError, WorkspaceError
from shardlab.rundir import RunDir
from shardlab.state import FINAL
from shardlab.workspace import Workspace, chosen


class Fetched(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One run after fetching. hashed: files that were read for it; problems: why it is not what it was, in clauses.
    unreadable: why its state cannot be told, or ''."""

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


def fetch(workspace: Workspace, patterns: Sequence[str]) -> list[Fetched]:
    """Every run whose id matches, or every run. Raises InputError for a pattern that matches none."""
    carry.bring(workspace, patterns)
    ids = chosen(workspace.run_ids(), patterns) if patterns else workspace.run_ids()
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # hashing and reading leave the interpreter's lock
        return list(pool.map(lambda run_id: fetch_run(RunDir(workspace.runs / run_id)), ids))


def fetch_run(run: RunDir) -> Fetched:
    """Make or check the manifest of one run. What is wrong with it is told in `problems`.

    A manifest that its run no longer agrees with is left as it is: it is the evidence.
    """
    found = records.read(run)
    state, damage = found.verdict.state, found.damage
    complete = state in FINAL
    fetched = Fetched(
        run=run.run_id,
        state=state,
        complete=complete,
        files=0,
        bytes=0,
        hashed=0,
        truncated=len(damage.truncated),
        corrupt=damage.lines,
        damage=damage.says(),
        unreadable=found.unreadable,
    )
    try:
        old = manifest.read(run)
        if old is None or not old.complete:
            now = manifest.make(run, complete=complete)
            fetched.hashed = len(now.files)
        else:
            now, difference = manifest.compare(run, old)
            fetched.hashed, fetched.added, fetched.problems = difference.hashed, difference.added, difference.problems
        if now != old and not fetched.problems:
            manifest.write(run, now)
    except (InputError, WorkspaceError) as error:
        fetched.problems = [str(error)]
        return fetched
    fetched.files, fetched.bytes = len(now.files), sum(file.bytes for file in now.files.values())
    return fetched
