"""Which files of a run `collect fetch --prune` removes, and how the folder of a pruned run is marked."""

from __future__ import annotations

import re

from shardlab.runs.rundir import RunDir

# Names of the files that determine the state of a run. The cluster keeps these files, so that `jobs status` can show the state
# and `jobs submit` does not submit the run again.
_KEPT_FILES = re.compile(r"run\.json|result\.json|job\.[^/]*|claim/.*|events\.[^/]*|(?:steps|env)/.*", re.DOTALL)
# A file that marks a run folder from which files were removed. Its name is hidden, so the file is not part of the run.
PRUNED_MARK = ".pruned"


def is_kept_by_cluster(file_name: str) -> bool:
    """Whether the cluster keeps the file of this name when the other files of a run are removed."""
    return _KEPT_FILES.fullmatch(file_name) is not None


def is_pruned(run_dir: RunDir) -> bool:
    """Whether files of this run were removed on this machine, after another machine had verified its own copies of them."""
    return (run_dir.path / PRUNED_MARK).is_file()
