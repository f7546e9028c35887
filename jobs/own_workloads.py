"""The workloads that a workspace defines itself: found, described without torch in this process, and frozen at submission.

A file is executed by a process of its own (`python -m trainers describe`), never by `jobs`; the answer is kept by the digest of
the files. Only files in WORKSPACE/workloads are executed, and only if the workspace began on this account or is trusted.
Code in the folder of a run may have come from another machine, so a new attempt uses the copy that was made here at submission
(WORKSPACE/.shardlab/own/DIGEST), unless the user trusts the run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from shardlab import files, model_file, own_workload, source_digest, workspace_trust
from shardlab.cell import Cell
from shardlab.decoders import DECODE_FAULTS, decoder
from shardlab.errors import InputError, ShardlabError
from shardlab.login_node import PYTHON
from shardlab.model_file import ModelFile
from shardlab.own_workload import FOLDER, Description, OwnWorkload, WorkloadSource
from shardlab.run import Run
from shardlab.workspace import Workspace
from trainers import menu
from trainers.workload import Workload

LEFT_S = 24 * 3600  # a temporary folder that is older is in use by nobody
ANSWER_S = 600  # importing torch from a cold network disk takes minutes


class OwnWorkloads(msgspec.Struct, frozen=True):
    """known: by name. sources: the files, by their digest. faults: why a file defines no workload, by the name that it would
    have defined."""

    known: dict[str, OwnWorkload] = {}
    sources: dict[str, WorkloadSource] = {}
    faults: dict[str, str] = {}

    def menu(self) -> dict[str, Workload]:
        """The workloads as entries of the menu, by name; `menu.workload_of` finds them from now on."""
        return {name: menu.add_own(known, Path(known.file)) for name, known in self.known.items()}

    def of(self, cell: Cell) -> OwnWorkload | None:
        """What is known of the workload of a cell; None if it ships."""
        return None if cell.workload_code is None else self.known[cell.workload]


def find(
    workspace: Workspace,
    names: Collection[str] | None = None,
    *,
    trust: bool = False,
    models: Mapping[str, ModelFile] | None = None,
) -> OwnWorkloads:
    """The workloads of the workspace, or only those with these names, and those that a matrix describes by their configuration.
    Other files are not executed.

    trust: mark the workspace as trusted if it has such files. Without a mark no file is executed, and each is a fault. Raises
    WorkspaceError."""
    known: dict[str, OwnWorkload] = {}
    sources: dict[str, WorkloadSource] = {}
    faults: dict[str, str] = {}
    for file in own_workload.files_in(workspace.path / FOLDER):
        both = {file.stem, f"{file.stem}-tiny"}
        if names is not None and not both & set(names):
            continue
        try:
            source = own_workload.read(file)
            workspace_trust.must_be_trusted(workspace, [file], trusted=trust)
            found = _described(workspace, source)
            if ships := sorted({one.name for one in found} & set(menu.workloads())):
                raise InputError(
                    f"{file}: the workload {ships[0]} ships with shardlab and cannot be replaced. Allowed: another file name."
                )
        except InputError as error:
            faults |= dict.fromkeys(both - set(menu.workloads()) | {file.stem}, str(error))
            continue
        sources[source.digest] = source
        known |= {one.name: one for one in found}
    for model in (models or {}).values():
        try:
            if (workspace.path / FOLDER / f"{model.name}.py").exists():
                raise InputError(f"{FOLDER}/{model.name}.py defines another workload {model.name}. Allowed: another file name.")
            if ships := sorted({model.name, f"{model.name}-tiny"} & set(menu.workloads())):
                raise InputError(f"the workload {ships[0]} ships with shardlab. Allowed: its name, or another file name.")
            found = _described(workspace, model.source, model.seq_len)
        except InputError as error:
            faults[model.name] = f"{model.origin}: {error}"
            continue
        sources[model.source.digest] = model.source
        known |= {one.name: one for one in found}
    return OwnWorkloads(known, sources, faults)


def store(workspace: Workspace) -> Path:
    """The folder of the frozen copies, each in a folder named by its digest."""
    return workspace.own / workspace_trust.ANSWERS


def freeze(workspace: Workspace, own: OwnWorkloads) -> None:
    """Keep a copy of the files, unless an undamaged copy is there. Raises WorkspaceError."""
    with files.as_workspace_error("clean up"):
        for left in store(workspace).glob(".*.tmp"):  # by a command that was killed
            if time.time() - left.stat().st_mtime > LEFT_S:
                shutil.rmtree(left, ignore_errors=True)
    for source in own.sources.values():
        _keep(workspace, source)


def of_run(workspace: Workspace, run: Run, *, trust: bool) -> OwnWorkloads:
    """The own workload of a run, for a new attempt: the code that was frozen here, or with `trust` the code in its folder.

    Raises InputError if the code was not submitted from this workspace and is not trusted."""
    known = run.own_workload
    if known is None or run.cell.workload_code is None:
        return OwnWorkloads()
    frozen = _copy(store(workspace) / run.cell.workload_code, known, run.cell.workload_code)
    if frozen is not None and (trust or known.is_data or workspace_trust.is_trusted(workspace)):
        return OwnWorkloads({known.name: known})
    carried = workspace.runs / run.run_id / FOLDER
    found = _copy(carried, known, run.cell.workload_code) if trust or known.is_data else None
    if found is None:
        what = "is not complete" if trust or known.is_data else "was not submitted from this workspace, so it is not executed"
        helps = "" if trust or known.is_data else " Read it; then allow it with --trust."
        raise InputError(f"{run.run_id}: the code of its workload {run.cell.workload} ({carried}) {what}.{helps}")
    return OwnWorkloads({known.name: known}, {found.digest: found})


def write(workspace: Path, run: Run, folder: Path) -> None:
    """Copy the code of a run's own workload from the frozen copy into the new folder of the run. Raises ShardlabError."""
    if (known := run.own_workload) is None:
        return
    frozen = _copy(workspace / known.code, known, known.code)
    if frozen is None:
        raise ShardlabError(f"{workspace / known.code}: the copy of {known.file} is missing or damaged; run the command again.")
    own_workload.write(folder / FOLDER, frozen)


def _keep(workspace: Workspace, source: WorkloadSource) -> None:
    final = store(workspace) / source.digest
    new = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    with files.as_workspace_error("write"):
        if final.is_dir() and _read(final / source.file.name) == source.digest:
            return
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
        own_workload.write(new, source)
        new.rename(final)


def _copy(folder: Path, known: OwnWorkload, code: str) -> WorkloadSource | None:
    """The files of a copy, or None if they are not those of this digest."""
    file = folder / Path(known.file).name
    return own_workload.read(file) if _read(file) == code else None


def _read(file: Path) -> str | None:
    try:
        return own_workload.read(file).digest
    except ShardlabError:
        return None


def _described(workspace: Workspace, source: WorkloadSource, seq_len: int | None = None) -> list[OwnWorkload]:
    """The workloads of a file. Raises InputError with the fault of the file."""
    key = "".join((source.digest, source_digest.source(), source_digest.packages(), str(seq_len or "")))
    kept = store(workspace) / f"{source.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    try:
        found = decoder(Description).decode(files.read(kept))
    except (OSError, *DECODE_FAULTS):
        found = _asked(source, seq_len)
        if found.fault:
            raise InputError(found.fault) from None
        files.make_folder(kept.parent)
        for earlier in kept.parent.glob(f"{source.name}-*.json"):  # of the file before it was edited
            earlier.unlink(missing_ok=True)
        files.write_json(kept, found, sync=False)
    return [msgspec.structs.replace(one, file=str(source.file)) for one in found.workloads]


def _asked(source: WorkloadSource, seq_len: int | None) -> Description:
    """What a process of its own finds out. Its output and its end are the file's matter as well as ours."""
    python = os.environ.get(PYTHON, sys.executable)
    with tempfile.TemporaryDirectory(prefix="shardlab-own-") as folder:
        answer, file = Path(folder) / "answer.json", source.file
        if file.suffix == model_file.SUFFIX:  # in the spelling of the runs; the user's file may have another
            own_workload.write(Path(folder) / FOLDER, source)
            file = Path(folder) / FOLDER / file.name
        length = [] if seq_len is None else ["--seq-len", str(seq_len)]
        argv = [python, "-P", "-m", "trainers", "describe", str(file), *length, "--out", str(answer)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, cwd=folder, env=environment, timeout=ANSWER_S, check=False
            )
            found = decoder(Description).decode(files.read(answer))
        except subprocess.TimeoutExpired:
            return Description(fault=f"{source.file}: its code did not end within {ANSWER_S} s.")
        except (OSError, *DECODE_FAULTS):
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            why = f"{python} says: {said[-1]}" if said else f"{python} ended with code {done.returncode}"
            return Description(fault=f"{source.file}: it cannot be found out what it defines. {why}")
    if any(one.code != source.digest for one in found.workloads):
        return Description(fault=f"{source.file}: changed while it was read; run the command again.")
    return found
