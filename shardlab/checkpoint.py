"""A run's checkpoints on disk: each whole or not there at all, and what is damaged is known before it is used.

A checkpoint grows in RUN/checkpoints/.step-00000010.tmp. When every file in it is synced, manifest.json lists them with
sizes and checksums, and one rename makes it step-00000010: a kill at any moment leaves the one before. Everything in it is
JSON or the plain bytes of tensors, never pickle: reading one runs no code.
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
from shardlab.cell import Cell
from shardlab.decoders import DECODE_FAULTS
from shardlab.errors import WorkspaceError

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
_WHOLE = re.compile(r"step-(\d{8,})")


class File(msgspec.Struct, frozen=True):
    """A file of a checkpoint beside its manifest."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json, written last.

    step: timed steps made. world: ranks that train. train_time_s: what these steps took, as in result.json. numbers: of
    the strategy's own, equal on all ranks. seal: SHA-256 of this file with an empty seal.
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
    files: list[File]
    seal: str = ""

    def sealed(self) -> Manifest:
        """This manifest with its seal."""
        bare = msgspec.json.encode(msgspec.structs.replace(self, seal=""), order="deterministic")
        return msgspec.structs.replace(self, seal=hashlib.sha256(bare).hexdigest())


def path_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step is when it is whole."""
    return run / FOLDER / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(path.name.removeprefix("step-"))


def begin(run: Path, step: int) -> Path:
    """An empty folder to write a checkpoint in; what a killed writer left is removed. Raises WorkspaceError."""
    with files.as_workspace_error("write"):
        for left in (run / FOLDER).glob(".step-*.tmp"):
            shutil.rmtree(left)
        growing = growing_path(run, step)
        growing.mkdir(parents=True)
    return growing


def growing_path(run: Path, step: int) -> Path:
    """Where the checkpoint of a step is while it is written."""
    return run / FOLDER / f".step-{step:08d}.tmp"


def commit(run: Path, manifest: Manifest, keep: int) -> None:
    """Make the checkpoint that lies complete in its growing folder the newest, then remove all but the `keep` newest.

    Raises WorkspaceError; what was there before is then still there.
    """
    growing, final = growing_path(run, manifest.step), path_of(run, manifest.step)
    files.write_json(growing / MANIFEST, manifest.sealed())
    with files.as_workspace_error("write"):
        if final.exists():  # of an earlier attempt in this folder, which passed it over as damaged
            shutil.rmtree(final)
        growing.rename(final)
        files.sync_folder(final.parent)
        for old in whole(run)[keep:]:
            # Renamed first: a kill in the middle of the removal must leave no half of a checkpoint under its name.
            doomed = old.with_name(f".{old.name}.tmp")
            old.rename(doomed)
            shutil.rmtree(doomed)


def whole(run: Path) -> list[Path]:
    """The checkpoints of a run that were finished, newest first; whether they are still sound, `damage` says."""
    with contextlib.suppress(FileNotFoundError):
        found = [(int(match[1]), path) for path in (run / FOLDER).iterdir() if (match := _WHOLE.fullmatch(path.name))]
        return [path for _, path in sorted(found, reverse=True)]
    return []


def read(path: Path) -> Manifest | str:
    """The manifest of a checkpoint, or why it is none."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except OSError as error:
        return f"{path}: its manifest cannot be read: {error.strerror}"
    except DECODE_FAULTS as error:
        return f"{path}: its manifest is damaged: {error}"
    if manifest.sealed().seal != manifest.seal:
        return f"{path}: its manifest is damaged: the seal does not fit it"
    return manifest


def damage(path: Path, these: Iterable[File]) -> str | None:
    """What is wrong with these files of a checkpoint, or None."""
    for file in these:
        there = path / file.name
        try:
            size = there.stat().st_size
            if size != file.bytes:
                return f"{there}: has {size} bytes, the manifest says {file.bytes}"
            if files.sha256(there) != file.sha256:
                return f"{there}: its checksum is not the manifest's"
        except OSError as error:
            return f"{there}: cannot be read: {error.strerror}"
    return None


# Of a cell, what may differ between a run and the one whose checkpoint it goes on from: on how many ranks and how they
# share the same work, and what does not touch it. A gathered checkpoint leaves the strategy open as well.
_RANKS = frozenset((
    "gpus", "nnodes", "dp", "pp", "servers", "launcher", "micro_batch_size", "gradient_accumulation_steps", "instruments",
    "memory_limit_gib", "time_limit_s", "hang_limit_s", "expect", "prove", "rehearses",
))  # fmt: skip
_STRATEGY = frozenset(("strategy", "tp", "activation_checkpointing", "compile", "options"))


def why_not(saved: Cell, cell: Cell, layout: str, of_workload: Iterable[str]) -> str | None:
    """Why a run of `cell` cannot go on from a checkpoint of `saved`, as a clause, or None. of_workload: names of the
    workload's own options."""
    ours, theirs = msgspec.to_builtins(cell), msgspec.to_builtins(saved)
    free = _RANKS | (_STRATEGY if layout == "whole" else frozenset())
    differ = sorted(key for key in ours if key not in free and ours[key] != theirs[key])
    options = {name for name in of_workload if cell.options.get(name) != saved.options.get(name)}
    differ += sorted(f"options.{name}" for name in options if "options" in free)
    return f"its cell differs in {', '.join(differ)}" if differ else None


class Growing:
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

    def close(self) -> File:
        """What stands on disk when this returns."""
        try:
            self._handle.flush()
            os.fsync(self._handle.fileno())
            self._handle.close()
        except OSError as error:
            raise WorkspaceError.from_os_error(error, "write") from error
        return File(self._path.name, self.size, self._hash.hexdigest())
