"""The checkpoints of a run on disk. A checkpoint is either complete or absent, and damage is found before a checkpoint is used.

The checkpoint after step 10 is first written into the folder RUN/checkpoints/.step-00000010.tmp. When all its files are synced,
manifest.json is written, which lists the files with sizes and checksums, and the folder is renamed to step-00000010. If the
process is killed at any moment, the previous checkpoint is intact. A checkpoint contains only JSON and the plain bytes of
tensors, no pickle, so reading a checkpoint executes no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shardlab.files import files
from shardlab.files.decoders import DECODE_FAULTS
from shardlab.matrix.cell import NEWER_OPTIONS, STRATEGY_OPTIONS, AnyCell, Role, find_role_keys
from shardlab.record_types import Count, Measured, Seconds

CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST_FILE = "manifest.json"
_COMPLETE_NAME = re.compile(r"step-(\d{8,})")


class CheckpointFile(msgspec.Struct, frozen=True):
    """An entry of the manifest: a file of the checkpoint, its size in bytes and its SHA-256 in hexadecimal."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9.-]*\Z")]
    bytes: Count
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of manifest.json, which is written after all other files of a checkpoint."""

    schema: Annotated[int, msgspec.Meta(ge=1, le=1)]
    step: Count
    """Number of timed steps before the checkpoint."""
    world: Count
    """Number of ranks that train."""
    layout: Literal["sharded", "whole"]
    """Sharded (each rank wrote its shards) or whole (one rank gathered and wrote everything)."""
    strategy: str
    tp: Count
    """Tensor-parallel degree."""
    cell_hash: str
    train_time_s: Seconds
    """Duration of these steps in seconds, as in result.json."""
    numbers: dict[str, Measured]
    """Numbers that the strategy saves; they are equal on all ranks."""
    files: list[CheckpointFile]
    seal: str = ""
    """SHA-256 of this manifest with an empty seal."""

    def add_seal(self) -> CheckpointManifest:
        """A copy of this manifest with its seal, which is its SHA-256."""
        unsealed_json = msgspec.json.encode(msgspec.structs.replace(self, seal=""), order="deterministic")
        return msgspec.structs.replace(self, seal=hashlib.sha256(unsealed_json).hexdigest())


def make_checkpoint_path(run_path: Path, step: int) -> Path:
    """The folder that contains the checkpoint of a step after the checkpoint is complete. run_path: the run folder."""
    return run_path / CHECKPOINTS_FOLDER / f"step-{step:08d}"


def parse_checkpoint_step(checkpoint_folder: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(checkpoint_folder.name.removeprefix("step-"))


def begin_checkpoint(run_path: Path, step: int) -> Path:
    """Make an empty temporary folder for a checkpoint and return its path. Raises WorkspaceError.

    Temporary folders of earlier checkpoints, which remain if processes are killed, are removed.
    """
    with files.as_workspace_error("write"):
        for leftover_folder in (run_path / CHECKPOINTS_FOLDER).glob(".step-*.tmp"):
            shutil.rmtree(leftover_folder)
        temporary_folder = make_temp_path(run_path, step)
        temporary_folder.mkdir(parents=True)
    return temporary_folder


def make_temp_path(run_path: Path, step: int) -> Path:
    """The temporary folder in which the checkpoint of a step is written."""
    return run_path / CHECKPOINTS_FOLDER / f".step-{step:08d}.tmp"


def commit_checkpoint(run_path: Path, manifest: CheckpointManifest, kept_count: int) -> None:
    """Write the manifest, publish the checkpoint, and then remove all checkpoints except the `kept_count` newest.

    All other files of the checkpoint must already be complete in its temporary folder. Raises WorkspaceError; the earlier
    checkpoints are then unchanged.
    """
    files.write_json(make_temp_path(run_path, manifest.step) / MANIFEST_FILE, manifest.add_seal())
    publish_checkpoint(run_path, manifest.step)
    remove_old_checkpoints(run_path, kept_count)


def publish_checkpoint(run_path: Path, step: int) -> None:
    """Rename the temporary folder of a checkpoint to its final name. Raises WorkspaceError.

    If the nodes of the run share no folder, each node renames its own folder; only the folder of rank 0's node has a manifest.
    """
    final_path = make_checkpoint_path(run_path, step)
    with files.as_workspace_error("write"):
        if final_path.exists():  # an earlier checkpoint of this step, which was damaged and not used
            shutil.rmtree(final_path)
        make_temp_path(run_path, step).rename(final_path)
        files.sync_folder(final_path.parent)


def remove_old_checkpoints(run_path: Path, kept_count: int) -> None:
    """Remove all but the `kept_count` newest checkpoints. Raises WorkspaceError."""
    with files.as_workspace_error("write"):
        for old_checkpoint in list_checkpoints(run_path)[kept_count:]:
            # The folder is renamed first, so that a kill during the removal does not leave an incomplete checkpoint under the
            # final name.
            renamed_checkpoint = old_checkpoint.with_name(f".{old_checkpoint.name}.tmp")
            old_checkpoint.rename(renamed_checkpoint)
            shutil.rmtree(renamed_checkpoint)


def list_checkpoints(run_path: Path) -> list[Path]:
    """The folders of the complete checkpoints of a run, newest first. This function does not look for damage in them."""
    with contextlib.suppress(FileNotFoundError):
        checkpoints_by_step = [
            (int(name_match[1]), path)
            for path in (run_path / CHECKPOINTS_FOLDER).iterdir()
            if (name_match := _COMPLETE_NAME.fullmatch(path.name))
        ]
        return [path for _, path in sorted(checkpoints_by_step, reverse=True)]
    return []


def read_manifest(checkpoint_folder: Path) -> CheckpointManifest | str:
    """The manifest of a checkpoint, or a sentence that says why it cannot be used."""
    try:
        manifest = msgspec.json.decode(files.read(checkpoint_folder / MANIFEST_FILE), type=CheckpointManifest)
    except OSError as error:
        return f"{checkpoint_folder}: its manifest cannot be read: {error.strerror}"
    except DECODE_FAULTS as error:
        return f"{checkpoint_folder}: its manifest is damaged: {error}"
    if manifest.add_seal().seal != manifest.seal:
        return f"{checkpoint_folder}: its manifest is damaged: its checksum `seal` does not match its content"
    return manifest


def find_damage(checkpoint_folder: Path, checkpoint_files: Iterable[CheckpointFile]) -> str | None:
    """A sentence about the first damaged file among these files of a checkpoint; None if all files are intact."""
    for manifest_entry in checkpoint_files:
        file_path = checkpoint_folder / manifest_entry.name
        try:
            found_bytes = file_path.stat().st_size
            if found_bytes != manifest_entry.bytes:
                return f"{file_path}: has {found_bytes} bytes, the manifest says {manifest_entry.bytes}"
            if files.compute_file_sha256(file_path) != manifest_entry.sha256:
                return f"{file_path}: its SHA-256 differs from the one in the manifest"
        except OSError as error:
            return f"{file_path}: cannot be read: {error.strerror}"
    return None


# The keys that may differ between a cell and the cell of the checkpoint from which its run resumes: the number of ranks, how
# ranks share the same work, and keys that do not affect the work. If the layout of the checkpoint is whole, the strategy may
# differ, too.
_RANK_KEYS = find_role_keys(Role.RANKS, Role.PASSES, Role.NODES, Role.PLATFORM, Role.START, Role.INSTRUMENTS, Role.BOOKKEEPING)
_STRATEGY_KEYS = find_role_keys(Role.STRATEGY, Role.EXECUTION)


def explain_refused_resume(saved_cell: AnyCell, cell: AnyCell, layout: str, workload_options: Iterable[str]) -> str | None:
    """Why a run of `cell` cannot resume from a checkpoint of the cell `saved_cell`, as part of a sentence; None if the run can.

    layout: the layout of the checkpoint. workload_options: the names of the workload's own options, which must not differ.
    """
    cell_values, saved_values = msgspec.to_builtins(cell), msgspec.to_builtins(saved_cell)
    for plain_cell in (cell_values, saved_values):  # when gradients are reduced does not change what a checkpoint contains
        option_items = plain_cell["options"].items()
        plain_cell["options"] = {
            name: value
            for name, value in option_items
            if name not in STRATEGY_OPTIONS and (name, value) not in NEWER_OPTIONS.items()
        }
    free_keys = _RANK_KEYS | (_STRATEGY_KEYS if layout == "whole" else frozenset())
    differing_keys = sorted(key for key in cell_values if key not in free_keys and cell_values[key] != saved_values[key])
    differing_options = {name for name in workload_options if cell.options.get(name) != saved_cell.options.get(name)}
    differing_keys += sorted(f"options.{name}" for name in differing_options if "options" in free_keys)
    return f"its cell differs in {', '.join(differing_keys)}" if differing_keys else None


class GrowingFile:
    """Writes a file of a checkpoint, and computes its SHA-256 at the same time. `close` syncs the file to the disk."""

    def __init__(self, path: Path) -> None:
        self._file_path, self._sha256, self.written_bytes = path, hashlib.sha256(), 0
        with files.as_workspace_error("write"):
            self._open_file = path.open("xb")

    def write(self, content: bytes | memoryview) -> None:
        """Append the content to the file. Raises WorkspaceError, for example if the disk is full."""
        with files.as_workspace_error("write"):
            self._open_file.write(content)
        self._sha256.update(content)
        self.written_bytes += len(content)

    def close(self) -> CheckpointFile:
        """Sync and close the file. Returns its entry for the manifest. Raises WorkspaceError."""
        with files.as_workspace_error("write"):
            self._open_file.flush()
            os.fsync(self._open_file.fileno())
            self._open_file.close()
        return CheckpointFile(self._file_path.name, self.written_bytes, self._sha256.hexdigest())
