"""A run's checkpoints on disk: each is complete or absent, and damage is found before a checkpoint is used.

A checkpoint is written in RUN/checkpoints/.step-00000010.tmp. When all its files are synced, manifest.json lists them with
sizes and checksums, and one rename makes the folder step-00000010. A kill at any moment leaves the previous checkpoint intact.
A checkpoint contains only JSON and the plain bytes of tensors, no pickle: reading it executes no code.
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

from shardlab import files
from shardlab.cell import Cell, Role, keys_of
from shardlab.decoders import DECODE_FAULTS
from shardlab.errors import WorkspaceError

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
_WHOLE = re.compile(r"step-(\d{8,})")


class CheckpointFile(msgspec.Struct, frozen=True):
    """A file of a checkpoint beside its manifest."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    bytes: int
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json, written last.

    step: number of timed steps that were done.
    world: number of ranks that train.
    train_time_s: time that these steps took, as in result.json.
    numbers: numbers that the strategy saves, equal on all ranks.
    seal: SHA-256 of this file with an empty seal.
    """

    schema: Annotated[int, msgspec.Meta(ge=1, le=1)]
    step: int
    world: int
    layout: Literal["sharded", "whole"]
    strategy: str
    tp: int
    cell_hash: str
    train_time_s: float
    numbers: dict[str, float]
    files: list[CheckpointFile]
    seal: str = ""

    def sealed(self) -> CheckpointManifest:
        """This manifest with its seal."""
        bare = msgspec.json.encode(msgspec.structs.replace(self, seal=""), order="deterministic")
        return msgspec.structs.replace(self, seal=hashlib.sha256(bare).hexdigest())


def path_of(run: Path, step: int) -> Path:
    """The folder of the checkpoint of a step, once it is complete."""
    return run / FOLDER / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(path.name.removeprefix("step-"))


def begin(run: Path, step: int) -> Path:
    """Make an empty folder to write a checkpoint in; remove what a killed process left. Raises WorkspaceError."""
    with files.as_workspace_error("write"):
        for left in (run / FOLDER).glob(".step-*.tmp"):
            shutil.rmtree(left)
        growing = growing_path(run, step)
        growing.mkdir(parents=True)
    return growing


def growing_path(run: Path, step: int) -> Path:
    """The folder of the checkpoint of a step while it is written."""
    return run / FOLDER / f".step-{step:08d}.tmp"


def commit(run: Path, manifest: CheckpointManifest, keep: int) -> None:
    """Publish the checkpoint, whose files are complete in its temporary folder, then remove all but the `keep` newest.

    Raises WorkspaceError; the earlier checkpoints are then unchanged.
    """
    files.write_json(growing_path(run, manifest.step) / MANIFEST, manifest.sealed())
    publish(run, manifest.step)
    remove_old(run, keep)


def publish(run: Path, step: int) -> None:
    """Give the temporary folder of a checkpoint its final name. Raises WorkspaceError.

    If each node has its own part of the run's folder, the folders of the nodes without rank 0 have no manifest.
    """
    final = path_of(run, step)
    with files.as_workspace_error("write"):
        if final.exists():  # of an earlier attempt in this folder, which passed it over as damaged
            shutil.rmtree(final)
        growing_path(run, step).rename(final)
        files.sync_folder(final.parent)


def remove_old(run: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints. Raises WorkspaceError."""
    with files.as_workspace_error("write"):
        for old in whole(run)[keep:]:
            # Renamed first: a kill in the middle of the removal must leave no half of a checkpoint under its name.
            doomed = old.with_name(f".{old.name}.tmp")
            old.rename(doomed)
            shutil.rmtree(doomed)


def whole(run: Path) -> list[Path]:
    """The finished checkpoints of a run, newest first; `damage` checks whether one is still intact."""
    with contextlib.suppress(FileNotFoundError):
        steps = [(int(match[1]), path) for path in (run / FOLDER).iterdir() if (match := _WHOLE.fullmatch(path.name))]
        return [path for _, path in sorted(steps, reverse=True)]
    return []


def read(path: Path) -> CheckpointManifest | str:
    """The manifest of a checkpoint, or a sentence that says why it cannot be used."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=CheckpointManifest)
    except OSError as error:
        return f"{path}: its manifest cannot be read: {error.strerror}"
    except DECODE_FAULTS as error:
        return f"{path}: its manifest is damaged: {error}"
    if manifest.sealed().seal != manifest.seal:
        return f"{path}: its manifest is damaged: its checksum `seal` does not match its content"
    return manifest


def damage(path: Path, these: Iterable[CheckpointFile]) -> str | None:
    """What is wrong with these files of a checkpoint, or None."""
    for file in these:
        there = path / file.name
        try:
            size = there.stat().st_size
            if size != file.bytes:
                return f"{there}: has {size} bytes, the manifest says {file.bytes}"
            if files.sha256(there) != file.sha256:
                return f"{there}: its SHA-256 differs from the one in the manifest"
        except OSError as error:
            return f"{there}: cannot be read: {error.strerror}"
    return None


# Keys that may differ between a cell and the cell of the checkpoint from which it resumes: the number of ranks, how they share
# the same work, and what does not affect the work. For a checkpoint with the layout whole, the strategy may differ as well.
_RANKS = keys_of(Role.RANKS, Role.PASSES, Role.NODES, Role.HARDWARE, Role.START, Role.INSTRUMENTS, Role.BOOKKEEPING)
_STRATEGY = keys_of(Role.STRATEGY, Role.EXECUTION)


def why_not(saved: Cell, cell: Cell, layout: str, of_workload: Iterable[str]) -> str | None:
    """Why a run of `cell` cannot resume from a checkpoint of `saved`, as a clause, or None. of_workload: names of the
    workload's own options."""
    ours, theirs = msgspec.to_builtins(cell), msgspec.to_builtins(saved)
    free = _RANKS | (_STRATEGY if layout == "whole" else frozenset())
    differ = sorted(key for key in ours if key not in free and ours[key] != theirs[key])
    options = {name for name in of_workload if cell.options.get(name) != saved.options.get(name)}
    differ += sorted(f"options.{name}" for name in options if "options" in free)
    return f"its cell differs in {', '.join(differ)}" if differ else None


class GrowingFile:
    """A file of a checkpoint while it is written, hashed as it grows and synced at its end."""

    def __init__(self, path: Path) -> None:
        self._path, self._hash, self.size = path, hashlib.sha256(), 0
        with files.as_workspace_error("write"):
            self._handle = path.open("xb")

    def write(self, content: bytes | memoryview) -> None:
        """Raises WorkspaceError, as on a full disk."""
        with files.as_workspace_error("write"):
            self._handle.write(content)
        self._hash.update(content)
        self.size += len(content)

    def close(self) -> CheckpointFile:
        """What stands on disk when this returns."""
        try:
            self._handle.flush()
            os.fsync(self._handle.fileno())
            self._handle.close()
        except OSError as error:
            raise WorkspaceError.from_os_error(error, "write") from error
        return CheckpointFile(self._path.name, self.size, self._hash.hexdigest())
