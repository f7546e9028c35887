"""The workspace: the user's folder with the cluster file, the runs, the report, and the folder .shardlab."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardlab.errors import InputError, ShardlabError, UnknownName, WorkspaceError
from shardlab.files import files, json_file
from shardlab.matrix.expansion import LAST_MATRIX, Expansion, LastMatrix
from shardlab.runs.run import RUN_ID
from shardlab.runs.rundir import RunDir
from shardlab.workspace import handles, workspace_trust


class Workspace:
    """A user's workspace. No file or folder is created in it before something has to be stored.

    path: the absolute path of the workspace as the user wrote it, which may contain symlinks. The nodes of a cluster may know
    the workspace only by this path, for example if the shared folder is a symlink on one of the machines.
    real_path: the path without symlinks and `..`. It is the same for all spellings of `path`, so it identifies the workspace.
    """

    def __init__(self, path: Path) -> None:
        self.real_path = path.resolve()
        self.path = self.real_path if ".." in path.parts else path.absolute()
        self.runs = self.path / "runs"
        self.shardlab_folder = self.path / ".shardlab"
        self.report = self.path / "report"

    @classmethod
    def find(cls, path_option: str | None) -> Workspace:
        """The workspace of a command: given by --workspace, else by $SHARDLAB_WORKSPACE, else the current folder.

        Raises InputError if the path is a file, or if it is not UTF-8, because the files of a run could not contain such a
        path.
        """
        path = Path(path_option or os.environ.get("SHARDLAB_WORKSPACE") or ".")
        if path.exists() and not path.is_dir():
            raise InputError(f"{path}: the workspace has to be a folder.")
        workspace = cls(path)
        try:
            f"{workspace.path}\n{workspace.real_path}".encode()
        except UnicodeEncodeError:
            raise InputError(
                f"{str(workspace.path)!r}: contains bytes that are not UTF-8. Allowed: a workspace whose path is in UTF-8."
            ) from None
        return workspace

    @property
    def own_templates(self) -> Path | None:
        """The folder with templates that replace shipped templates; None in a checkout of shardlab, where it is our package."""
        folder = self.path / "templates"
        return None if (folder / "__init__.py").exists() else folder

    def list_template_files(self) -> list[Path]:
        """The user's templates, sorted by path."""
        return sorted(self.own_templates.rglob("*.j2")) if self.own_templates is not None else []

    def explain_exposed_folders(self) -> list[str]:
        """A sentence for each folder of the workspace that other users of this machine can change; empty if there is none."""
        folders = [folder for folder in (self.path, self.shardlab_folder, self.runs) if folder.exists()]
        with files.as_workspace_error("read"):
            return [reason for folder in folders if (reason := workspace_trust.explain_write_access(folder)) is not None]

    def resolve_path(self, path: str) -> Path:
        """The absolute path for a path that the user wrote, for example in the cluster file. `~` is the home folder.

        path: relative to the workspace, unless it is absolute or begins with `~`.
        """
        return (self.path / Path(path).expanduser()).absolute()

    def find_data_folder(self, configured_path: str | None) -> Path:
        """The folder that contains the data sets. configured_path: data.path of the cluster file; None or empty: use
        .shardlab/data."""
        return self.resolve_path(configured_path) if configured_path else self.shardlab_folder / "data"

    def find_run_dir(self, run_name: str, matrix_name: str | None = None) -> RunDir:
        """The folder of the run with this name, which `match_run` accepts. Raises InputError if there is no such run."""
        run_dir = RunDir(self.runs / self.match_run(run_name, matrix_name))
        if not run_dir.run_json.exists():
            raise UnknownName("run", run_name, self.list_run_ids(), place=str(self.runs))
        return run_dir

    def match_run(self, name: str, matrix_name: str | None = None) -> str:
        """The id of the one run with this name. matrix_name: as for `match_runs`. Raises InputError if no run or more than one
        run has the name."""
        if not RUN_ID.fullmatch(name) and not {*"*?["} & {*name}:
            raise InputError(f"{name!r} is no name of a run. Allowed: a run id, its beginning, or a short name such as c3.2.")
        run_ids = self.match_runs([name], matrix_name)
        if len(run_ids) > 1:
            cell_handles = self.number_cells(matrix_name)
            candidates = [f"{handles.make_handle(run_id, cell_handles)} {run_id}".strip() for run_id in run_ids[:5]]
            raise InputError(f"{name!r} matches {len(run_ids)} runs: {', '.join(candidates)}. Allowed: one run.")
        return run_ids[0]

    def match_runs(
        self, names: Iterable[str], matrix_name: str | None = None, run_ids: Iterable[str] | None = None
    ) -> list[str]:
        """The ids of the runs with these names, as `handles.match_run_ids` finds them.

        matrix_name: the matrix whose cells handles number; None: the last matrix. run_ids: the ids to choose from; None: those
        of all runs in this workspace."""
        all_ids = self.list_run_ids() if run_ids is None else run_ids
        return handles.match_run_ids(all_ids, names, self.number_cells(matrix_name))

    def number_cells(self, matrix_name: str | None = None) -> dict[str, str]:
        """The handles of the cells of a matrix, by the ids of the cells. Empty if the matrix cannot be read here. matrix_name:
        None: the last matrix."""
        with contextlib.suppress(ShardlabError):
            return handles.number_cells(cell.id for cell in self.read_expansion(matrix_name).cells)
        return {}

    def list_run_ids(self) -> list[str]:
        """The ids of all runs in this workspace, sorted."""
        try:
            return sorted(entry.name for entry in os.scandir(self.runs) if RUN_ID.fullmatch(entry.name) and entry.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise WorkspaceError.from_os_error(error, "read") from error

    def list_run_dirs(self) -> list[RunDir]:
        """The folders of all runs in this workspace, sorted by id."""
        return [RunDir(self.runs / run_id) for run_id in self.list_run_ids()]

    @contextlib.contextmanager
    def hold_runs_lock(self) -> Iterator[None]:
        """Hold the lock of this workspace, without which no run may be added or removed. Waits while another process holds it.

        The kernel releases the lock when the process ends, even if the process is killed.
        """
        workspace_trust.begin_workspace(self)
        with files.hold_lock(self.shardlab_folder / "runs.lock"):
            yield

    def store_expansion(self, expansion: Expansion) -> None:
        """Store the expansion of a matrix, and record this matrix as the last matrix."""
        folder = self.shardlab_folder / "matrices"
        files.make_folder(folder)
        files.write_json(folder / f"{expansion.name}.json", expansion)
        files.write_json(self.shardlab_folder / LAST_MATRIX, LastMatrix(schema=1, name=expansion.name))

    def list_matrix_names(self) -> list[str]:
        """The names of the matrices that were rendered in this workspace, sorted."""
        return sorted(path.stem for path in (self.shardlab_folder / "matrices").glob("*.json"))

    def read_expansion(self, matrix_name: str | None) -> Expansion:
        """The expansion of the matrix with this name; None: the last matrix. Raises InputError if it was not rendered here."""
        fault, expansion = "the notes on the matrix cannot be read: {}.", None
        if (
            matrix_name is None
            and (last_matrix := json_file.read_json(self.shardlab_folder / LAST_MATRIX, LastMatrix, fault)) is not None
        ):
            matrix_name = last_matrix.name
        if matrix_name is not None:
            if matrix_name not in self.list_matrix_names():
                raise UnknownName("matrix in this workspace", matrix_name, self.list_matrix_names())
            expansion = json_file.read_json(self.shardlab_folder / "matrices" / f"{matrix_name}.json", Expansion, fault)
        if expansion is None:
            raise InputError(
                f"{self.path}: no matrix was submitted here; start with: jobs submit --matrix quickstart "
                "(or name the workspace with --workspace)."
            )
        return expansion
