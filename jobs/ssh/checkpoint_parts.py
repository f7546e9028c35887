"""Gathers on the first node the checkpoint from which a run resumes, if each node has a part of the checkpoint
(docs/ssh.md)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jobs.ssh import node_transfer
from jobs.ssh.node_transfer import MustStop
from jobs.ssh.step import NodeLost
from shardlab.errors import ShardlabError
from shardlab.files import files
from shardlab.runs import checkpoint, part_files, placement
from shardlab.runs.checkpoint import CheckpointFile, CheckpointManifest
from shardlab.runs.run import Run
from shardlab.runs.rundir import RunDir
from shardlab.workspace import inventory
from shardlab.workspace.workspace import Workspace

STAGING_FOLDER = (
    ".resume"  # a hidden folder in the folder of the new run, for files that arrive; it does not belong to the records
)


class StoredCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint from which a run may resume."""

    old_run_dir: RunDir
    """The old run that wrote the checkpoint."""
    path: Path
    manifest: CheckpointManifest
    needs_records: bool
    """Whether the new run continues the step records of the old run, as a new attempt at the same cell does."""

    def find_faulty_files(self, must_stop: MustStop) -> list[CheckpointFile]:
        """The files of the checkpoint that are missing on this machine, or whose content differs from the manifest. Reads all
        files, unless `must_stop` says that the run must end."""
        return [
            file for file in self.manifest.files if not must_stop() and checkpoint.find_damage(self.path, [file]) is not None
        ]

    def find_late_ranks(self) -> list[int]:
        """The ranks whose step records on this machine end before the step of the checkpoint."""
        if not self.needs_records:
            return []
        step = self.manifest.step
        return [
            rank
            for rank in range(self.manifest.world)
            if not any(record.step == step and not record.warmup for record in self.old_run_dir.steps(rank).records)
        ]


def gather_checkpoint(run_dir: RunDir, run: Run, must_stop: MustStop) -> StoredCheckpoint | None:
    """Bring the newest usable checkpoint of the runs that run.json names to this machine, with all its files and with the step
    records before it.

    run_dir: the folder of the new run. Returns None if the run resumes from no other run, or if `must_stop` says that the run
    must end. A damaged checkpoint is skipped, which is recorded as an event. Raises ShardlabError if no checkpoint is usable,
    or if a node that has a part of the checkpoint does not answer.
    """
    unusable_reasons: list[str] = []
    for old_run in (RunDir(run_dir.path.parent / run_id) for run_id in run.resume):
        for checkpoint_path in checkpoint.list_checkpoints(old_run.path):
            manifest = checkpoint.read_manifest(checkpoint_path)
            if isinstance(manifest, str):
                unusable_reason = manifest
            else:
                stored_checkpoint = StoredCheckpoint(old_run, checkpoint_path, manifest, manifest.cell_hash == run.cell_hash)
                unusable_reason = _complete_checkpoint(run_dir, run, stored_checkpoint, must_stop)
                if must_stop():
                    return None
                if not unusable_reason:
                    return stored_checkpoint
            run_dir.write_event("attempt", "checkpoint_passed_over", why=unusable_reason)
            unusable_reasons.append(unusable_reason)
    if not run.resume:
        return None
    reasons_text = "; ".join(unusable_reasons) or "they have no checkpoint on this node"
    raise ShardlabError(
        f"cannot resume from {', '.join(run.resume)}: {reasons_text}. `jobs submit` starts the cell from step 0."
    )


def _complete_checkpoint(run_dir: RunDir, run: Run, stored_checkpoint: StoredCheckpoint, must_stop: MustStop) -> str:
    """Bring the missing files of a checkpoint from the nodes that wrote it. Returns '' if the checkpoint is usable afterwards,
    otherwise a clause that says why the checkpoint is not usable.

    Raises ShardlabError if a node that may have the missing files does not answer.
    """
    faulty_files = stored_checkpoint.find_faulty_files(must_stop)
    if not faulty_files and not stored_checkpoint.find_late_ranks():
        return ""
    workspace = Workspace(run_dir.path.parent.parent)
    old_placement = placement.read_placement(stored_checkpoint.old_run_dir.read_events())
    node_by_name = {node.name: node for node in inventory.read_inventory(workspace, run.cluster["name"]).nodes}
    runs_dir, old_run_dir = run_dir.path.parent, stored_checkpoint.old_run_dir
    absent_node_errors = []
    for node_name in old_placement.nodes if old_placement is not None else ():
        if must_stop():
            return ""
        staging_folder = run_dir.path / STAGING_FOLDER / node_name
        files.make_folder(staging_folder)
        wanted_paths = [stored_checkpoint.path / file.name for file in faulty_files]
        if stored_checkpoint.needs_records:
            wanted_paths += [old_run_dir.steps_file(rank) for rank in range(stored_checkpoint.manifest.world)]
        wanted_names = [str(path.relative_to(runs_dir)) for path in wanted_paths]
        try:
            if node_name not in node_by_name:
                raise NodeLost(node_name, "the inventory does not list it any more")
            node_transfer.fetch_files(node_by_name[node_name], workspace, wanted_names, staging_folder, must_stop)
        except NodeLost as node_lost_error:
            absent_node_errors.append(str(node_lost_error))
        faulty_files = _place_files(
            stored_checkpoint, staging_folder / stored_checkpoint.path.relative_to(runs_dir), faulty_files
        )
        _place_records(old_run_dir, staging_folder / old_run_dir.run_id / "steps")
        shutil.rmtree(staging_folder.parent, ignore_errors=True)
    return _explain_unusable(stored_checkpoint, faulty_files, absent_node_errors)


def _explain_unusable(
    stored_checkpoint: StoredCheckpoint, faulty_files: Sequence[CheckpointFile], absent: Sequence[str]
) -> str:
    late_ranks = stored_checkpoint.find_late_ranks()
    if not faulty_files and not late_ranks:
        return ""
    fault_clause = f"{len(faulty_files)} of its {len(stored_checkpoint.manifest.files)} files are missing or damaged"
    if not faulty_files:
        fault_clause = f"the step records of {len(late_ranks)} of its {stored_checkpoint.manifest.world} ranks end before it"
    why = f"the checkpoint at step {stored_checkpoint.manifest.step} of {stored_checkpoint.old_run_dir.run_id}: {fault_clause}"
    if absent:
        raise ShardlabError(f"cannot resume from {why} ({'; '.join(absent)}). Run `jobs retry` again when the node answers.")
    return why


def _place_files(
    stored_checkpoint: StoredCheckpoint, staging_folder: Path, faulty_files: Sequence[CheckpointFile]
) -> list[CheckpointFile]:
    """Move the files that arrived undamaged into the folder of the checkpoint. Returns the files that are still faulty.

    staging_folder: the folder with the files that arrived. faulty_files: the files that were missing or damaged.
    """
    intact_files = [file for file in faulty_files if checkpoint.find_damage(staging_folder, [file]) is None]
    with files.as_workspace_error("write"):
        for file in intact_files:
            files.move_into_place(staging_folder / file.name, stored_checkpoint.path / file.name)
    return [file for file in faulty_files if file not in intact_files]


def _place_records(old_run_dir: RunDir, arrived_folder: Path) -> None:
    """Replace each file of step records on this machine by the file of the same name in the folder `arrived_folder`, if the
    arrived file begins with the same records."""
    for record_name in files.list_names(arrived_folder):
        own_path = old_run_dir.path / "steps" / record_name
        with files.as_workspace_error("write"):
            if not own_path.exists() or part_files.is_beginning(own_path, arrived_folder / record_name):
                files.move_into_place(arrived_folder / record_name, own_path)
