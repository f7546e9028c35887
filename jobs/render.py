"""Make the run folders of a matrix: run.json, frozen, and the script that a person reads and the scheduler runs."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import templates
from jobs.launcher import launcher
from shardlab import __version__, files, host
from shardlab.cell import Cell
from shardlab.cluster import Cluster
from shardlab.errors import InputError, WorkspaceError
from shardlab.matrix import Matrix
from shardlab.run import Run, World, run_id
from shardlab.rundir import RunDir
from shardlab.workspace import Expansion, Workspace

SCRIPT = "launch/local.sh.j2"


class Source(msgspec.Struct, frozen=True):
    """What every run of one rendering has in common."""

    matrix: str
    cluster: dict[str, str]
    data_path: str
    proofs_path: str
    versions: dict[str, str]
    git_commit: str | None
    created: str


def source(matrix: str, cluster: Cluster, workspace: Workspace) -> Source:
    """Observed once for a whole matrix."""
    return Source(
        matrix=matrix,
        cluster={"name": cluster.name, "provider": cluster.provider},
        data_path=str(workspace.data(cluster.data.path)),
        proofs_path=str(workspace.own / "proofs"),
        versions={**host.packages(), "shardlab": __version__, "python": sys.version.split()[0]},
        git_commit=host.git_commit(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def run_of(cell: Cell, repeat: int, attempt: int, source: Source, resume: Sequence[str] = ()) -> Run:
    """The frozen run of one attempt at one repeat of a cell. resume: runs to go on from, in order."""
    return Run(
        schema=1,
        run_id=run_id(cell, repeat, attempt),
        matrix=source.matrix,
        cell=cell,
        cell_hash=cell.hash(),
        repeat=repeat,
        attempt=attempt,
        launcher=cell.launcher,
        rehearsal=launcher(cell.launcher).rehearsal or cell.rehearses is not None,
        scale="full" if cell.rehearses is None else "tiny",
        world=World(cell.nnodes, cell.world_size // cell.nnodes, cell.world_size),
        cluster=source.cluster,
        data_path=source.data_path,
        versions=source.versions,
        git_commit=source.git_commit,
        templates={SCRIPT: templates.digest(SCRIPT)},
        created=source.created,
        proofs_path=source.proofs_path,
        resume=list(resume),
    )


def script(run: Run, folder: Path) -> str:
    """job.sh: what is shown by a dry run is what is written."""
    command = launcher(run.launcher).command(run, sys.executable)
    return templates.render(SCRIPT, run=run, folder=folder, python=sys.executable, command=command)


def write(run: Run, runs: Path) -> RunDir:
    """Make the run's folder whole or not at all. Raises InputError where one that was sent is in the way."""
    final = RunDir(runs / run.run_id)
    if final.path.exists() and final.judge().state != "planned":
        raise InputError(f"{final.path}: this run was sent already; `jobs retry` makes a new attempt.")
    folder = RunDir(runs / f".{run.run_id}.tmp")
    files.make_folder(runs)
    with files.as_workspace_error("render"):
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.path.mkdir()
    try:
        files.write_json(folder.run_json, run, sync=False)
        files.write_atomic(folder.job_script, script(run, final.path).encode(), sync=False, mode=0o755)
        folder.write_event("controller", "rendered", sync=False)
        with files.as_workspace_error("render"):
            if final.path.exists():
                shutil.rmtree(final.path)
            folder.path.rename(final.path)
    except WorkspaceError:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder.path)
        raise
    return final


def keep(workspace: Workspace, source: Source, matrix: Matrix, cells: Sequence[Cell], repeats: int) -> None:
    """Note in the workspace what the matrix came to, for those who only read runs."""
    tiny = any(cell.rehearses for cell in cells)
    workspace.keep_expansion(
        Expansion(
            schema=1,
            name=source.matrix,
            title=f"{matrix.file.title} (rehearsal at scale tiny)" if tiny else matrix.file.title,
            path=str(Path(matrix.path).absolute()),
            cells=[
                {
                    "id": cell.name(),
                    "cell": msgspec.to_builtins(cell),
                    "runs": [run_id(cell, repeat) for repeat in range(1, repeats + 1)],
                }
                for cell in cells
            ],
            excluded=[{"cell": one.keys, "why": one.why} for one in matrix.excluded],
            settings=[msgspec.to_builtins(one) for one in matrix.file.settings],
            baseline=matrix.file.baseline,
            traces=matrix.file.traces,
            assumed=[msgspec.to_builtins(one) for one in matrix.file.assumed],
            notes=[msgspec.to_builtins(one) for one in matrix.file.notes],
            scale="tiny" if tiny else "full",
            reported=[msgspec.to_builtins(one) for one in matrix.file.reported],
            claims=[msgspec.to_builtins(one) for one in matrix.file.claims],
        )
    )
