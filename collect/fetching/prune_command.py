"""`collect fetch --prune`: shows which files will be removed, asks the user, removes the files, and shows the result."""

from __future__ import annotations

from collections.abc import Sequence

from collect.fetching import progress, prune
from collect.fetching.fetched_run import Fetched
from shardlab.console import Output
from shardlab.workspace import Workspace


def free(output: Output, workspace: Workspace, fetched: Sequence[Fetched], *, is_confirmed: bool) -> bool:
    """Remove the files of fetched runs on the cluster or its nodes, after the user has agreed.

    is_confirmed: whether the user has already agreed and is not asked. Returns False if files that should be removed were not
    removed; True if all were removed, or the user did not agree.
    """
    with progress.shown(output) as shown:
        places = prune.verify(workspace, fetched, shown)
    for place in places:
        if place.runs:
            found = f"{place.count:,} files of {len(place.runs):,} run(s), {place.size / 2**20:,.1f} MiB"
            output.remark(f"{place.where}: {found}: their checksums are those of the files on this machine.")
    if not any(place.runs for place in places):
        output.remark("There is nothing to remove.")
    elif not is_confirmed and output.ask("Remove these files there? Type yes: ") != "yes":
        output.remark("Nothing was removed.")
        return True
    with progress.shown(output) as shown:
        freed = prune.remove(places, shown)
    for run in fetched:
        run.freed = [removed for removed in freed if removed.run == run.run]
    for removed in freed:
        if removed.why:
            output.remark(f"{removed.where}: files of {removed.run} stay: {removed.why}", style="red")
    for where in dict.fromkeys(removed.where for removed in freed if removed.files):
        of_place = [removed for removed in freed if removed.where == where]
        files, size = sum(removed.files for removed in of_place), sum(removed.bytes for removed in of_place)
        output.remark(f"{where}: {files:,} files removed, {size / 2**20:,.1f} MiB freed")
    return not any(removed.why for removed in freed)
