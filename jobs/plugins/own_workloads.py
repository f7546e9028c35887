"""The workloads that a workspace defines itself (WORKSPACE/workloads), and the models that a matrix describes by a file.

Only files in WORKSPACE/workloads are executed, and only if this user account created the workspace or the user trusts it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from jobs.plugins import own_answers
from shardlab.errors import InputError
from shardlab.files import plugin_source
from shardlab.files.plugin_source import PluginSource
from shardlab.matrix.cell import Cell
from shardlab.matrix.model_file import ModelFile
from shardlab.plugins.own_workload import FOLDER, Description, OwnWorkload
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace
from trainers import menu
from trainers.workload import Workload


class OwnWorkloads(msgspec.Struct, frozen=True):
    """The workspace's own workloads."""

    by_name: dict[str, OwnWorkload] = {}
    """The workloads, by name."""
    sources: dict[str, PluginSource] = {}
    """The files that define them, by their digest."""
    faults: dict[str, str] = {}
    """Why a file defines no workload, by each workload name that the file would have defined."""

    def menu(self) -> dict[str, Workload]:
        """Register the workloads, so that `menu.workload_of` finds them from now on, and return their menu entries by name."""
        return {name: menu.add_own_workload(workload, Path(workload.file)) for name, workload in self.by_name.items()}

    def find_for_cell(self, cell: Cell) -> OwnWorkload | None:
        """The workload of a cell if the workspace defines it; None if the workload ships with shardlab."""
        return None if cell.workload_code is None else self.by_name[cell.workload]


def find_workloads(
    workspace: Workspace, names: Collection[str] | None = None, models: Mapping[str, ModelFile] | None = None
) -> OwnWorkloads:
    """Find the workspace's own workloads, and the models that a matrix describes by a configuration.

    names: the names to look for; None: all workloads. Files that cannot define one of these names are not executed. If this
    user may not act in the workspace (shardlab.workspace.workspace_trust), no file is executed, and each file is reported as a
    fault.
    models: the models that a matrix describes by a configuration, by name. Raises WorkspaceError.
    """
    workloads_by_name: dict[str, OwnWorkload] = {}
    sources: dict[str, PluginSource] = {}
    faults: dict[str, str] = {}
    for file in plugin_source.plugin_files(workspace.path / FOLDER):
        possible_names = {file.stem, f"{file.stem}-tiny"}
        if names is not None and not possible_names & set(names):
            continue
        try:
            source = plugin_source.read_plugin(file)
            workspace_trust.must_be_allowed(workspace, f"execute {file}")
            workloads = _describe_workloads(workspace, source)
            if shipped := sorted({workload.name for workload in workloads} & set(menu.workloads())):
                raise InputError(
                    f"{file}: the workload {shipped[0]} ships with shardlab and cannot be replaced. Allowed: another file name."
                )
        except InputError as error:
            faults |= dict.fromkeys(possible_names - set(menu.workloads()) | {file.stem}, str(error))
            continue
        sources[source.digest] = source
        workloads_by_name |= {workload.name: workload for workload in workloads}
    for model in (models or {}).values():
        try:
            if (workspace.path / FOLDER / f"{model.name}.py").exists():
                raise InputError(f"{FOLDER}/{model.name}.py defines another workload {model.name}. Allowed: another file name.")
            if shipped := sorted({model.name, f"{model.name}-tiny"} & set(menu.workloads())):
                raise InputError(f"the workload {shipped[0]} ships with shardlab. Allowed: its name, or another file name.")
            workloads = _describe_workloads(workspace, model.source, model.seq_len)
        except InputError as error:
            faults[model.name] = f"{model.origin}: {error}"
            continue
        sources[model.source.digest] = model.source
        workloads_by_name |= {workload.name: workload for workload in workloads}
    return OwnWorkloads(workloads_by_name, sources, faults)


def _describe_workloads(workspace: Workspace, source: PluginSource, seq_len: int | None = None) -> list[OwnWorkload]:
    """The workloads that a file defines. seq_len: as in `own_answers.describe_plugin`. Raises InputError if the file has a
    fault."""
    description = own_answers.describe_plugin(workspace, source, Description, seq_len)
    return [msgspec.structs.replace(workload, file=str(source.file)) for workload in description.workloads]
