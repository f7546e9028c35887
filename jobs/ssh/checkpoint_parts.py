"""Gathers on the first node the checkpoint from which a run resumes, if each node has a part of the checkpoint
(docs/ssh.md)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jobs.ssh import node_transfer
from jobs.ssh.node_transfer import MustStop
from jobs.ssh.step import Lost
from shardlab.errors import ShardlabError
from shardlab.files import files
from shardlab.remote import rsync
from shardlab.runs import checkpoint, part_files, placement
from shardlab.runs.checkpoint import CheckpointFile, CheckpointManifest
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace

STAGING = ".resume"  # a hidden folder in the folder of the new run, for files that arrive; it does not belong to the records


class StoredCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint from which a run may resume.

    run: the old run that wrote the checkpoint. needs_records: whether the new run continues the step records of the old run, as
    a new attempt at the same cell does.
    """

    run: RunDir
    path: Path
    manifest: CheckpointManifest
    needs_records: bool

    def faulty(self, must_stop: MustStop) -> list[CheckpointFile]:
        """The files of the checkpoint that are missing on this machine, or whose content differs from the manifest. Reads all
        files, unless `must_stop` says that the run must end."""
        return [file for file in self.manifest.files if not must_stop() and checkpoint.damage(self.path, [file]) is not None]

    def late_ranks(self) -> list[int]:
        """The ranks whose step records on this machine end before the step of the checkpoint."""
        if not self.needs_records:
            return []
        step = self.manifest.step
        return [
            rank
            for rank in range(self.manifest.world)
            if not any(record.step == step and not record.warmup for record in self.run.steps(rank).records)
        ]


def gather(folder: RunDir, run: Run, must_stop: MustStop) -> StoredCheckpoint | None:
    """Bring the newest usable checkpoint of the runs that run.json names to this machine, with all its files and with the step
    records before it.

    folder: the folder of the new run. Returns None if the run resumes from no other run, or if `must_stop` says that the run
    must end. A damaged checkpoint is skipped, which is recorded as an event. Raises ShardlabError if no checkpoint is usable,
    or if a node that has a part of the checkpoint does not answer.
    """
    whys: list[str] = []
    for old in (RunDir(folder.path.parent / name) for name in run.resume):
        for path in checkpoint.whole(old.path):
            manifest = checkpoint.read(path)
            if isinstance(manifest, str):
                why = manifest
            else:
                saved = StoredCheckpoint(old, path, manifest, manifest.cell_hash == run.cell_hash)
                why = _complete(folder, run, saved, must_stop)
                if must_stop():
                    return None
                if not why:
                    return saved
            folder.write_event("attempt", "checkpoint_passed_over", why=why)
            whys.append(why)
    if not run.resume:
        return None
    found = "; ".join(whys) or "they have no checkpoint on this node"
    raise ShardlabError(f"cannot resume from {', '.join(run.resume)}: {found}. `jobs submit` starts the cell from step 0.")


def _complete(folder: RunDir, run: Run, saved: StoredCheckpoint, must_stop: MustStop) -> str:
    """Bring the missing files of a checkpoint from the nodes that wrote it. Returns '' if the checkpoint is usable afterwards,
    otherwise a clause that says why the checkpoint is not usable.

    Raises ShardlabError if a node that may have the missing files does not answer.
    """
    faulty = saved.faulty(must_stop)
    if not faulty and not saved.late_ranks():
        return ""
    workspace = Workspace(folder.path.parent.parent)
    placed = placement.of(saved.run.events())
    known = {node.name: node for node in inventory.read(workspace, run.cluster["name"]).nodes}
    absent = []
    for name in placed.nodes if placed is not None else ():
        if must_stop():
            return ""
        staging = folder.path / STAGING / name
        files.make_folder(staging)
        names = [str((saved.path / file.name).relative_to(workspace.path)) for file in faulty]
        names += [str((saved.run.path / "steps").relative_to(workspace.path))] if saved.needs_records else []
        try:
            if name not in known:
                raise Lost(name, "the inventory does not list it any more")
            node_transfer.bring(known[name], workspace, names, staging, must_stop)
        except Lost as lost:
            absent.append(str(lost))
        faulty = _place_files(saved, staging / saved.path.relative_to(workspace.path), faulty)
        _place_records(saved.run, staging / saved.run.path.relative_to(workspace.path) / "steps")
        shutil.rmtree(staging.parent, ignore_errors=True)
    return _why_unusable(saved, faulty, absent)


def _why_unusable(saved: StoredCheckpoint, faulty: Sequence[CheckpointFile], absent: Sequence[str]) -> str:
    late = saved.late_ranks()
    if not faulty and not late:
        return ""
    what = f"{len(faulty)} of its {len(saved.manifest.files)} files are missing or damaged"
    if not faulty:
        what = f"the step records of {len(late)} of its {saved.manifest.world} ranks end before it"
    why = f"the checkpoint at step {saved.manifest.step} of {saved.run.run_id}: {what}"
    if absent:
        raise ShardlabError(f"cannot resume from {why} ({'; '.join(absent)}). Run `jobs retry` again when the node answers.")
    return why


def _place_files(saved: StoredCheckpoint, arrived: Path, faulty: Sequence[CheckpointFile]) -> list[CheckpointFile]:
    """Move the files that arrived undamaged into the folder of the checkpoint. Returns the files that are still faulty.

    arrived: the folder with the files that arrived. faulty: the files that were missing or damaged.
    """
    intact = [file for file in faulty if _is_regular(arrived / file.name) and checkpoint.damage(arrived, [file]) is None]
    with files.as_workspace_error("write"):
        for file in intact:
            rsync.put_in_place(arrived / file.name, saved.path / file.name)
    return [file for file in faulty if file not in intact]


def _place_records(old: RunDir, arrived: Path) -> None:
    """Replace each file of step records on this machine by the file of the same name in the folder `arrived`, if the arrived
    file begins with the same records."""
    for name in files.names(arrived):
        here = old.path / "steps" / name
        if not re.fullmatch(part_files.STEPS, name) or not _is_regular(arrived / name):
            continue
        with files.as_workspace_error("write"):
            if not here.exists() or part_files.is_beginning(here, arrived / name):
                rsync.put_in_place(arrived / name, here)


def _is_regular(path: Path) -> bool:
    try:
        files.open_regular(path).close()
    except OSError:
        return False
    return True
