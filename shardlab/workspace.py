"""The folder where a person works: their cluster file, our notes, and the runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from shardlab import files
from shardlab.decoders import DECODE_FAULTS
from shardlab.errors import InputError, UnknownName, WorkspaceError
from shardlab.run import RUN_ID
from shardlab.rundir import RunDir

Traces = Literal["exact", "like-hta"]


class Expansion(msgspec.Struct, kw_only=True):
    """.shardlab/matrices/NAME.json: what a matrix came to when it was last rendered, for those who only read runs."""

    schema: int
    name: str
    title: str
    path: str
    cells: list[dict[str, Any]]  # id, cell, runs: the run ids of its repeats
    excluded: list[dict[str, Any]]
    scale: str = "full"  # tiny: each cell's `rehearses` is the one that it stands for
    reported: list[dict[str, Any]] = []
    claims: list[dict[str, Any]] = []
    settings: list[dict[str, Any]] = []
    baseline: str = "single"
    traces: Traces = "exact"  # how the study that is judged read its traces
    assumed: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []


class Workspace:
    """Nothing is created before something has to be kept.

    path: the folder as the user names it. The nodes of a cluster may know it by this name alone, as where the folder that
    they share is a symlink on one of them. real_path: the folder itself, without symlinks and `..`: two spellings of one
    workspace have the same real_path, so this is what tells workspaces apart.
    """

    def __init__(self, path: Path) -> None:
        self.real_path = path.resolve()
        self.path = self.real_path if ".." in path.parts else path.absolute()
        self.runs = self.path / "runs"
        self.own = self.path / ".shardlab"
        self.report = self.path / "report"
        self.own_templates = self.path / "templates"  # a person's, that stand before ours

    @classmethod
    def find(cls, given: str | None) -> Workspace:
        """--workspace, else $SHARDLAB_WORKSPACE, else the current folder.

        Raises InputError for a file, and for a path that is no UTF-8, which no file of a run could name.
        """
        path = Path(given or os.environ.get("SHARDLAB_WORKSPACE") or ".")
        if path.exists() and not path.is_dir():
            raise InputError(f"{path}: the workspace has to be a folder.")
        found = cls(path)
        try:
            f"{found.path}\n{found.real_path}".encode()
        except UnicodeEncodeError:
            raise InputError(
                f"{str(found.path)!r}: holds bytes that are no UTF-8. Allowed: a workspace in a folder with a name in UTF-8."
            ) from None
        return found

    def exposed(self) -> list[str]:
        """Why other users of this machine could change what lies here, a sentence for each folder; none where they cannot.

        Under sudo the folder may be the caller's own.
        """
        caller = os.environ.get("SUDO_UID", "")
        trusted = {0, os.geteuid(), int(caller) if caller.isdecimal() else 0}
        found = []
        for folder in (self.path, self.own, self.runs):
            try:
                status = folder.stat()
            except OSError:  # it is not there yet, or whoever needs it says why
                continue
            if status.st_uid not in trusted:
                found.append(f"{folder}: it belongs to another user (number {status.st_uid}), who can change what lies in it.")
            elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
                found.append(f"{folder}: every user of this machine can write there; run: chmod o-w {shlex.quote(str(folder))}")
        return found

    def relative(self, path: str) -> Path:
        """A path that a person wrote into a file, absolute; `~` is their home."""
        return (self.path / Path(path).expanduser()).absolute()

    def data(self, given: str | None) -> Path:
        """Where data sets lie: the path that cluster.yaml gives, else a folder of our own."""
        return self.relative(given) if given else self.own / "data"

    def run(self, run_id: str) -> RunDir:
        """The run with exactly this id. Raises InputError for anything that is no run id or no run here."""
        if not RUN_ID.fullmatch(run_id):
            raise InputError(f"{run_id!r} is no run id. Allowed: {RUN_ID.pattern}.")
        found = RunDir(self.runs / run_id)
        if not found.run_json.exists():
            raise UnknownName("run", run_id, self.run_ids()[:20], where=str(self.runs))
        return found

    def run_ids(self) -> list[str]:
        """The ids of all runs here, sorted."""
        try:
            return sorted(e.name for e in os.scandir(self.runs) if RUN_ID.fullmatch(e.name) and e.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise WorkspaceError.from_os_error(error, "read") from error

    def all_runs(self) -> list[RunDir]:
        """All runs here, by id."""
        return [RunDir(self.runs / run_id) for run_id in self.run_ids()]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other command changes which runs there are; the kernel lets go however a command ends."""
        with files.locked(self.own / "runs.lock"):
            yield

    def keep_expansion(self, expansion: Expansion) -> None:
        """Remember what a matrix came to, and that it was the last one."""
        folder = self.own / "matrices"
        files.make_folder(folder)
        files.write_json(folder / f"{expansion.name}.json", expansion)
        files.write_json(self.own / "last-matrix.json", {"schema": 1, "name": expansion.name})

    def expansions(self) -> list[str]:
        """The names of the matrices that were rendered here."""
        return sorted(path.stem for path in (self.own / "matrices").glob("*.json"))

    def expansion(self, name: str | None) -> Expansion:
        """What the named matrix, or else the last one, came to here. Raises InputError where there is none."""
        try:
            if name is None:
                name = str(msgspec.json.decode(files.read(self.own / "last-matrix.json"))["name"])
            if name not in self.expansions():
                raise UnknownName("matrix in this workspace", name, self.expansions())
            raw = files.read(self.own / "matrices" / f"{name}.json")
            return msgspec.json.decode(raw, type=Expansion)
        except FileNotFoundError:
            raise InputError(
                f"{self.path}: no matrix was submitted here; start with: jobs submit --matrix quickstart "
                "(or name the workspace with --workspace)."
            ) from None
        except OSError as error:
            raise WorkspaceError.from_os_error(error, "read") from error
        except (*DECODE_FAULTS, KeyError, TypeError) as error:
            raise InputError(f"{self.own}: the notes on the matrix cannot be read: {error}.") from None


def chosen(ids: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The ids that match any of the shell patterns. Raises InputError for a pattern that matches none."""
    from fnmatch import fnmatchcase

    known = list(ids)
    picked: set[str] = set()
    for pattern in patterns:
        matches = [run_id for run_id in known if fnmatchcase(run_id, pattern)]
        if not matches:
            raise UnknownName("run", pattern, known[:20])
        picked.update(matches)
    return [run_id for run_id in known if run_id in picked]
