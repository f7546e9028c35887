"""A workload that a file of the workspace defines: the files that it consists of, and what `jobs` knows of it without torch.

WORKSPACE/workloads/NAME.py defines the workload NAME. Files of this folder whose names begin with `_` are helpers, which the
other files may import; they count as a part of each workload. The digest over the file and the helpers is a key of the cell, so
that two models of one name are never taken for the same.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import msgspec

from shardlab import files
from shardlab.cell import Optimizer
from shardlab.errors import InputError, WorkspaceError
from shardlab.registry import Option

FOLDER = "workloads"  # in a workspace, and the folder of the copies in the folder of a run
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
MOST_BYTES = 1 << 20  # of one file


class OwnWorkload(msgspec.Struct, frozen=True):
    """What is known of the workload at its default options. name, unit, parameters and so on: as in trainers.workload.Workload.

    code: the digest of its files. file: the file that defines it, in the workspace from which the run was submitted.
    flops_per_unit: None if the operations cannot be counted. block_count: the number of blocks that are wrapped one by one.
    tensor_degrees, most_stages: as in trainers.workload.Workload.
    The others are of a model by its configuration (shardlab/model_file.py), whose file is JSON. block: the class of its blocks.
    twin: whether it is the tiny twin. longest: the longest sequence, in tokens. remarks: sentences about what could not be
    derived.
    """

    name: str
    summary: str
    code: str
    file: str
    unit: str
    parameters: int
    block_count: int
    flops_per_unit: float | None
    flops_source: str
    optimizer: Optimizer
    options: tuple[Option, ...]
    tensor_degrees: tuple[int, ...] = ()
    most_stages: int = 0
    block: str = ""
    twin: bool = False
    seq_len: int | None = None
    longest: int | None = None
    remarks: tuple[str, ...] = ()

    @property
    def is_data(self) -> bool:
        """Whether a configuration defines it, so that no code of the workspace is executed."""
        return self.file.endswith(".json")


class Description(msgspec.Struct, frozen=True):
    """What `python -m trainers describe` found in a file: its workloads, or why it defines none."""

    workloads: list[OwnWorkload] = []
    fault: str = ""


class WorkloadSource(msgspec.Struct, frozen=True):
    """file: the path of the file that defines a workload. contents: that file and every helper, by the name of the file."""

    file: Path
    contents: dict[str, bytes]

    @property
    def name(self) -> str:
        """The name of the workload."""
        return self.file.stem

    @property
    def digest(self) -> str:
        """16 hexadecimal digits over the names and contents of the files."""
        sha256 = hashlib.sha256()
        for name, content in sorted(self.contents.items()):
            sha256.update(f"{name} {len(content)}\n".encode() + content)
        return sha256.hexdigest()[:16]


def files_in(folder: Path) -> list[Path]:
    """The files of a folder that define a workload each, by name; none if the folder does not exist."""
    return sorted(path for path in python_files(folder) if not path.name.startswith("_"))


def read(file: Path) -> WorkloadSource:
    """The file with its helpers; a configuration (.json) has none. Raises InputError for a name that no plug-in may have, and
    for a file that is too long or cannot be read."""
    if file.suffix == ".json":
        return WorkloadSource(file, {file.name: _content(file)})
    if not NAME.fullmatch(file.stem):
        raise InputError(
            f"{file}: {file.stem!r} cannot be the name of a plug-in. Allowed: a file name that matches {NAME.pattern}.py."
        )
    helpers = [path for path in python_files(file.parent) if path.name.startswith("_")]
    return WorkloadSource(file, {path.name: _content(path) for path in (file, *helpers)})


def texts(workspace: Path) -> dict[str, bytes]:
    """All workloads and helpers of a workspace, by their path in it. Raises InputError for a file that cannot be read."""
    return {f"{FOLDER}/{path.name}": _content(path) for path in python_files(workspace / FOLDER)}


def python_files(folder: Path) -> list[Path]:
    """The workloads and helpers in a folder, by name."""
    return [folder / name for name in files.names(folder) if name.endswith(".py") and not name.startswith(".")]


def _content(path: Path) -> bytes:
    try:
        with files.open_regular(path) as handle:
            content = handle.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {os.strerror(error.errno) if error.errno else error}.") from None
    if len(content) > MOST_BYTES:
        raise InputError(f"{path}: longer than {MOST_BYTES >> 20} MiB. Allowed: Python code; data belongs in files of its own.")
    return content


def write(folder: Path, source: WorkloadSource) -> None:
    """Copy the files into a new folder. Raises WorkspaceError."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise WorkspaceError.from_os_error(error, "write") from error
    for name, content in source.contents.items():
        files.write_new(folder / name, content)
