"""Bring the runs of a workspace that lies on a cluster: checksummed there, carried by rsync, and held against that here."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from collect import manifest
from shardlab import away, files
from shardlab.away import Away
from shardlab.errors import InputError, ShardlabError
from shardlab.remote import ssh_command
from shardlab.rundir import RunDir
from shardlab.workspace import Workspace

# What a cut transfer left of a file is kept apart and gone on from; a file appears under its name when it is whole.
OPTIONS = ("--recursive", "--links", "--times", "--perms", "--compress", "--partial-dir=.rsync-partial", "--from0")
NOTES = ("matrices", "last-matrix.json", "proofs")  # of .shardlab: what the matrices came to, for those who only read runs


def bring(workspace: Workspace, patterns: Sequence[str]) -> int:
    """Fetch every run whose id matches, or every run, from where they lie; how many were carried.

    The cluster makes the manifest of each first, so that what comes is held against what left. A run that has ended and
    is here already is not carried again. Where the runs are here, nothing is done. Raises ShardlabError.
    """
    there = away.known(workspace)
    if there is None:
        return 0
    asked = [word for pattern in patterns for word in ("--run", pattern)]
    found = there.ask("collect", ["fetch", *asked])
    wanted = [run["run"] for run in found if not (run["complete"] and _is_here(workspace, run["run"]))]
    for run in wanted:
        # The manifest of a run that went on is the cluster's: ours was of less.
        (workspace.runs / run / manifest.NAME).unlink(missing_ok=True)
    files.make_folder(workspace.runs)
    _rsync(there, f"{there.workspace}/runs/", workspace.runs, [f"{run}/" for run in wanted])
    _rsync(there, f"{there.workspace}/.shardlab/", workspace.own, NOTES)
    return len(wanted)


def _is_here(workspace: Workspace, run_id: str) -> bool:
    try:
        mine = manifest.read(RunDir(workspace.runs / run_id))
    except InputError:
        return False  # a damaged one is brought again
    return mine is not None and mine.complete


def _rsync(there: Away, source: str, target: Path, names: Sequence[str]) -> None:
    """Carry these names below `source`; those that are not there are passed over. Raises ShardlabError."""
    if not names:
        return
    if shutil.which("rsync") is None:
        raise ShardlabError("rsync is not on this machine, which carries the runs; install it (apt install rsync).")
    if _sees(there):
        origin, shell = source, []
    else:
        *ssh, host = ssh_command(there.address)
        origin, shell = f"{host}:{source}", [f"--rsh={shlex.join([word for word in ssh if word != '--'])}"]
    listed = "\0".join(names).encode()
    argv = ["rsync", *OPTIONS, *shell, "--ignore-missing-args", "--files-from=-", origin, f"{target}/"]
    done = subprocess.run(argv, input=listed, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ShardlabError(
            f"{there.host}: rsync could not carry all ({said[0] if said else f'exit code {done.returncode}'}); what came is "
            "whole, and the same command goes on."
        )


def _sees(there: Away) -> bool:
    """Whether this machine has the cluster's workspace under the same path, as on shared storage."""
    try:
        return (Path(there.workspace) / away.MARK).read_text() == there.mark
    except OSError:
        return False
