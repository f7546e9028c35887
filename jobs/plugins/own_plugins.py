"""The plug-ins of a workspace that runs execute: workloads and strategies that the workspace defines itself.

This module finds the plug-ins of a matrix, and copies their code into the folders of runs. The code is frozen at submission.
`jobs` never executes it: separate processes do, and only if this user account created the workspace or the user trusts it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Generic

import msgspec

from jobs.plugins import command_folder, plugin_store
from jobs.plugins.command_folder import CommandFolder
from jobs.plugins.plugin_store import Description
from shardlab.errors import InputError, ShardlabError
from shardlab.files import plugin_source
from shardlab.files.plugin_source import PluginSource
from shardlab.matrix.cell import AnyCell, Cell
from shardlab.matrix.model_file import ModelFile
from shardlab.plugins.plugin_kind import STRATEGIES, WORKLOADS, OwnStrategy, OwnWorkload, PluginDescription, PluginKind
from shardlab.plugins.plugin_process import RefusingProcess
from shardlab.runs.run import Run
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace
from trainers import menu
from trainers.strategy import Strategy
from trainers.workload import Workload


class PluginSet(msgspec.Struct, Generic[Description]):
    """Plug-ins of one kind that a workspace defines."""

    by_name: dict[str, Description] = {}
    """The plug-ins, by name."""
    source_by_digest: dict[str, PluginSource] = {}
    """The files that define them, by their digest."""
    fault_by_name: dict[str, str] = {}
    """Why a file defines no plug-ins, by each name that was looked for in the file; if no names were given, by the name of the
    file."""

    def find_plugin(self, plugin_name: str, code_digest: str | None) -> Description | None:
        """The plug-in with this name; None if `code_digest`, the digest of its code in a cell, is None, because it ships with
        shardlab."""
        return None if code_digest is None else self.by_name[plugin_name]

    def add_file(
        self,
        plugin_kind: PluginKind[PluginDescription[Description]],
        source: PluginSource,
        added_plugins: list[Description],
        shipped_names: Collection[str],
    ) -> None:
        """Add the plug-ins that a file defines. Raises InputError if the name of a plug-in is taken; then none is added.

        shipped_names: the names of the plug-ins of this kind that ship with shardlab.
        """
        file_by_name = {name: plugin.file for name, plugin in self.by_name.items()}
        for plugin in added_plugins:
            plugin_kind.refuse_used_name(source.file, plugin.name, shipped_names, file_by_name)
        self.source_by_digest[source.digest] = source
        self.by_name.update({plugin.name: msgspec.structs.replace(plugin, file=str(source.file)) for plugin in added_plugins})


class OwnPlugins(msgspec.Struct, frozen=True):
    """The plug-ins of a workspace: its own workloads and strategies."""

    workloads: PluginSet[OwnWorkload] = msgspec.field(default_factory=PluginSet[OwnWorkload])
    strategies: PluginSet[OwnStrategy] = msgspec.field(default_factory=PluginSet[OwnStrategy])
    process_by_digest: dict[str, RefusingProcess] = {}
    """The processes that say which cells the strategies refuse, by the digest of the file."""
    command_folders: dict[str, CommandFolder] = {}
    """The folders of the commands that a matrix gives as workloads, by the names of the commands."""

    @property
    def sources(self) -> list[PluginSource]:
        """The source files of all workloads and strategies in this collection."""
        return [*self.workloads.source_by_digest.values(), *self.strategies.source_by_digest.values()]

    def find_workload(self, cell: AnyCell) -> OwnWorkload | None:
        """The workload of a cell if the workspace defines it; None if the workload ships with shardlab."""
        return None if cell.command is not None else self.workloads.find_plugin(cell.workload, cell.workload_code)

    def find_strategy(self, cell: AnyCell) -> OwnStrategy | None:
        """The strategy of a cell if the workspace defines it; None if the strategy ships with shardlab."""
        return self.strategies.find_plugin(cell.strategy, cell.strategy_code)

    def make_workload_menu(self) -> dict[str, Workload]:
        """Every workload by name: the shipped workloads and the workspace's own workloads, which are registered, so that
        `menu.find_workload_of_cell` finds them from now on."""
        own_entry_by_name = {
            name: menu.add_own_workload(own_workload, Path(own_workload.file))
            for name, own_workload in self.workloads.by_name.items()
        }
        return menu.load_workloads() | own_entry_by_name

    def make_strategy_menu(self) -> dict[str, Strategy]:
        """Every strategy by name: the shipped strategies and the workspace's own strategies, which are registered, so that
        `menu.find_strategy_of_cell` finds them from now on."""
        own_entry_by_name = {name: self._make_entry(strategy) for name, strategy in self.strategies.by_name.items()}
        for menu_entry in own_entry_by_name.values():
            menu.add_own_strategy(menu_entry)
        return menu.load_strategies() | own_entry_by_name

    def close(self) -> None:
        """End the processes that were asked which cells are refused."""
        for process in self.process_by_digest.values():
            process.close()

    def _make_entry(self, strategy: OwnStrategy) -> Strategy:
        process = self.process_by_digest.setdefault(strategy.code, RefusingProcess(Path(strategy.file)))

        def refuse(cell: Cell) -> str | None:
            return process.ask_refusal(cell, None if cell.workload_code is None else self.workloads.by_name.get(cell.workload))

        # only the code of the file knows the engine, and only ranks execute this code
        return Strategy(refuse=refuse, engine="", **msgspec.structs.asdict(strategy))


def find_plugins(
    workspace: Workspace,
    workload_names: Collection[str],
    strategy_names: Collection[str],
    model_by_name: Mapping[str, ModelFile],
    interpreter_by_plugin: Mapping[str, str] = {},
) -> OwnPlugins:
    """Find the plug-ins of the workspace with these names.

    workload_names, strategy_names: the names. model_by_name: the models that a matrix describes by a configuration file, by
    name. interpreter_by_plugin: as for `find_plugin_set`. Raises WorkspaceError.
    """
    own_workloads = find_plugin_set(workspace, WORKLOADS, menu.load_workloads(), workload_names, interpreter_by_plugin)
    add_models(workspace, own_workloads, model_by_name)
    return OwnPlugins(own_workloads, find_plugin_set(workspace, STRATEGIES, menu.load_strategies(), strategy_names))


def find_plugin_set(
    workspace: Workspace,
    kind: PluginKind[PluginDescription[Description]],
    shipped: Collection[str],
    names: Collection[str] | None = None,
    interpreter_by_plugin: Mapping[str, str] = {},
) -> PluginSet[Description]:
    """Find the plug-ins of one kind that the workspace defines.

    Files that cannot define any of the names are not executed. If this user may not act in the workspace
    (shardlab.workspace.workspace_trust), no file is executed, and each file is reported as a fault.

    shipped: the names of the plug-ins of this kind that ship with shardlab. names: the names to look for; None:
    all plug-ins. interpreter_by_plugin: the interpreters that execute files instead of this process's interpreter, by the names
    of plug-ins. Raises WorkspaceError.
    """
    plugins = PluginSet[Description]()
    for plugin_file in plugin_source.list_plugin_files(workspace.path / kind.folder):
        base_name = kind.make_base_name(plugin_file)
        sought_names = [base_name] if names is None else sorted(name for name in names if kind.may_define(plugin_file, name))
        if not sought_names:
            continue
        try:
            read_source = plugin_source.read_plugin(plugin_file)
            workspace_trust.must_be_allowed(workspace, f"execute {plugin_file}")
            if kind.folder == STRATEGIES.folder:
                _must_not_share_helpers(workspace, read_source)
            interpreter = next((interpreter_by_plugin[name] for name in sought_names if name in interpreter_by_plugin), None)
            plugins.add_file(
                kind, read_source, plugin_store.describe_plugins(workspace, kind, read_source, python=interpreter), shipped
            )
        except InputError as error:
            plugins.fault_by_name.update(
                {name: str(error) for name in sought_names if name == base_name or name not in shipped}
            )
    return plugins


def freeze_plugins(workspace: Workspace, plugins: OwnPlugins) -> None:
    """Copy the code of plug-ins and the folders of commands into the store of the workspace. Raises ShardlabError."""
    plugin_store.freeze_sources(workspace, plugins.sources)
    command_folder.freeze_folders(workspace, [*plugins.command_folders.values()])


def add_models(workspace: Workspace, workloads: PluginSet[OwnWorkload], model_by_name: Mapping[str, ModelFile]) -> None:
    """Add the models that a matrix describes by a configuration to the workspace's own workloads. No code of the workspace is
    executed for them. Raises WorkspaceError."""
    for model in model_by_name.values():
        try:
            if (workspace.path / WORKLOADS.folder / f"{model.name}.py").exists():
                raise InputError(
                    f"{WORKLOADS.folder}/{model.name}.py defines another workload {model.name}. Allowed: another file name."
                )
            if shipped_names := sorted({model.name, f"{model.name}-tiny"} & set(menu.load_workloads())):
                raise InputError(
                    f"the workload {shipped_names[0]} ships with shardlab. Allowed: its name, or another file name."
                )
            described_plugins = plugin_store.describe_plugins(workspace, WORKLOADS, model.source, model.seq_len)
            workloads.add_file(WORKLOADS, model.source, described_plugins, ())
        except InputError as error:
            workloads.fault_by_name[model.name] = f"{model.origin}: {error}"


def _must_not_share_helpers(workspace: Workspace, source: PluginSource) -> None:
    """Raises InputError if a helper file of strategies has the same name as a helper file of workloads. A rank executes both,
    and Python would import only one of the two files."""
    workload_files = {path.name for path in plugin_source.list_code_files(workspace.path / WORKLOADS.folder)}
    if shared_names := sorted(
        file_name for file_name in source.contents if file_name.startswith("_") and file_name in workload_files
    ):
        raise InputError(
            f"{source.file.parent / shared_names[0]}: {WORKLOADS.folder}/{shared_names[0]} has the same name, and a "
            "rank could import only one of them. Allowed: different names."
        )


def read_run_plugins(workspace: Workspace, run: Run, *, trust: bool) -> OwnPlugins:
    """The plug-ins of a run, for a new attempt at the same run.

    Their code comes from the copy that was frozen in this workspace, or, if no copy exists and `trust` is true, from the run's
    folder. Raises InputError if the code was not submitted from this workspace and is not trusted.
    """
    workloads, strategies = PluginSet[OwnWorkload](), PluginSet[OwnStrategy]()
    if run.cell.command is not None and run.cell.workload_code is not None:
        command_folder.must_have_frozen_copy(plugin_store.find_store(workspace), run.cell.workload_code)
    if (workload := run.own_workload) is not None and run.cell.workload_code is not None:
        carried_sources = _read_carried_code(workspace, run, workload, run.cell.workload_code, trust=trust or workload.is_data)
        workloads = PluginSet({workload.name: workload}, carried_sources)
    if (strategy := run.own_strategy) is not None and run.cell.strategy_code is not None:
        carried_sources = _read_carried_code(workspace, run, strategy, run.cell.strategy_code, trust=trust)
        strategies = PluginSet({strategy.name: strategy}, carried_sources)
    return OwnPlugins(workloads, strategies)


def write_plugin_code(store_folder: Path, run: Run, run_folder: Path) -> None:
    """Copy the code of a run's plug-ins into the new folder of the run. store_folder: the folder of the frozen copies. Raises
    ShardlabError if a copy is missing or damaged."""
    if run.cell.command is not None and run.cell.workload_code is not None:
        command_folder.copy_into_run(store_folder, run.cell.workload_code, run_folder)
    for plugin_kind, plugin in ((WORKLOADS, run.own_workload), (STRATEGIES, run.own_strategy)):
        if plugin is None:
            continue
        frozen_copy = plugin_store.read_copy(store_folder / plugin.code, plugin.file, plugin.code)
        if frozen_copy is None:
            raise ShardlabError(
                f"{store_folder / plugin.code}: the copy of {plugin.file} is missing or damaged; run the command again."
            )
        plugin_source.write_plugin(run_folder / plugin_kind.folder, frozen_copy)


def _read_carried_code(
    workspace: Workspace, run: Run, plugin: OwnWorkload | OwnStrategy, code_digest: str, *, trust: bool
) -> dict[str, PluginSource]:
    """The code of a plug-in from the folder of a run, by the digest of the code. Empty if this workspace has a frozen copy,
    which is then used instead.

    plugin: the plug-in. code_digest: the digest of the plug-in's code. trust: whether the user allows code from the run's
    folder. Raises InputError."""
    kind = WORKLOADS if isinstance(plugin, OwnWorkload) else STRATEGIES
    frozen_copy = plugin_store.read_copy(plugin_store.find_store(workspace) / code_digest, plugin.file, code_digest)
    if frozen_copy is not None and (trust or workspace_trust.is_allowed(workspace)):
        return {}
    code_folder = workspace.runs / run.run_id / kind.folder
    carried_copy = plugin_store.read_copy(code_folder, plugin.file, code_digest) if trust else None
    if carried_copy is None:
        problem_clause = "is not complete" if trust else "was not submitted from this workspace, so it is not executed"
        trust_hint = "" if trust else " Read it; then allow it with --trust."
        raise InputError(
            f"{run.run_id}: the code of its {kind.noun} {plugin.name} ({code_folder}) {problem_clause}.{trust_hint}"
        )
    return {carried_copy.digest: carried_copy}
