"""The plug-ins of a workspace: workloads and strategies that the workspace defines itself.

This module finds the plug-ins of a matrix, and copies their code into the folders of runs. The code is frozen at submission.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from jobs.plugins import own_copies, own_strategies, own_workloads
from jobs.plugins.own_strategies import OwnStrategies, RefusingProcess
from jobs.plugins.own_workloads import OwnWorkloads
from shardlab.errors import InputError, ShardlabError
from shardlab.files import plugin_source
from shardlab.files.plugin_source import PluginSource
from shardlab.matrix.model_file import ModelFile
from shardlab.plugins import own_strategy, own_workload
from shardlab.plugins.own_strategy import OwnStrategy
from shardlab.plugins.own_workload import OwnWorkload
from shardlab.runs.run import Run
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace
from trainers import menu
from trainers.strategy import Strategy
from trainers.workload import Workload


class OwnPlugins(msgspec.Struct, frozen=True):
    """The plug-ins of a workspace: its own workloads and strategies."""

    workloads: OwnWorkloads = OwnWorkloads()
    strategies: OwnStrategies = OwnStrategies()

    @property
    def sources(self) -> list[PluginSource]:
        """The source files of all workloads and strategies in this collection."""
        return [*self.workloads.sources.values(), *self.strategies.sources.values()]

    def workload_menu(self) -> dict[str, Workload]:
        """Every workload by name: the shipped workloads and the workspace's own workloads."""
        return menu.workloads() | self.workloads.menu()

    def strategy_menu(self) -> dict[str, Strategy]:
        """Every strategy by name: the shipped strategies and the workspace's own strategies."""
        return menu.strategies() | self.strategies.menu(self.workloads.by_name)


def find_plugins(
    workspace: Workspace, workloads: Collection[str], strategies: Collection[str], models: Mapping[str, ModelFile]
) -> OwnPlugins:
    """Find the plug-ins of the workspace with these names.

    workloads, strategies: the names. models: the models that a matrix describes by a configuration file, by name.
    """
    return OwnPlugins(
        own_workloads.find_workloads(workspace, workloads, models), own_strategies.find_strategies(workspace, strategies)
    )


def read_run_plugins(workspace: Workspace, run: Run, *, trust: bool) -> OwnPlugins:
    """The plug-ins of a run, for a new attempt at the same run.

    Their code comes from the copy that was frozen in this workspace, or, if no copy exists and `trust` is true, from the run's
    folder. Raises InputError if the code was not submitted from this workspace and is not trusted.
    """
    workload, strategy = run.own_workload, run.own_strategy
    plugins = OwnPlugins()
    if workload is not None and run.cell.workload_code is not None:
        sources = _read_carried_code(workspace, run, workload, run.cell.workload_code, trust=trust or workload.is_data)
        plugins = OwnPlugins(OwnWorkloads({workload.name: workload}, sources))
    if strategy is not None and run.cell.strategy_code is not None:
        sources = _read_carried_code(workspace, run, strategy, run.cell.strategy_code, trust=trust)
        processes = {strategy.code: RefusingProcess(Path(strategy.file))}
        plugins = msgspec.structs.replace(plugins, strategies=OwnStrategies({strategy.name: strategy}, sources, {}, processes))
    return plugins


def write_plugin_code(store: Path, run: Run, folder: Path) -> None:
    """Copy the code of a run's plug-ins into the new folder of the run. store: the folder of the frozen copies. Raises
    ShardlabError if a copy is missing or damaged."""
    for plugin, folder_name in ((run.own_workload, own_workload.FOLDER), (run.own_strategy, own_strategy.FOLDER)):
        if plugin is None:
            continue
        frozen_copy = own_copies.read_copy(store / plugin.code, plugin.file, plugin.code)
        if frozen_copy is None:
            raise ShardlabError(
                f"{store / plugin.code}: the copy of {plugin.file} is missing or damaged; run the command again."
            )
        plugin_source.write_plugin(folder / folder_name, frozen_copy)


def _read_carried_code(
    workspace: Workspace, run: Run, plugin: OwnWorkload | OwnStrategy, code: str, *, trust: bool
) -> dict[str, PluginSource]:
    """The code of a plug-in from the folder of a run, by the digest of the code. Empty if this workspace has a frozen copy,
    which is then used instead.

    plugin: the plug-in. code: the digest of the plug-in's code. trust: whether the user allows code from the run's folder.
    Raises InputError.
    """
    kind, folder = ("workload", own_workload.FOLDER) if isinstance(plugin, OwnWorkload) else ("strategy", own_strategy.FOLDER)
    frozen_copy = own_copies.read_copy(own_copies.find_plugin_copies_folder(workspace) / code, plugin.file, code)
    if frozen_copy is not None and (trust or workspace_trust.is_allowed(workspace)):
        return {}
    code_folder = workspace.runs / run.run_id / folder
    carried_copy = own_copies.read_copy(code_folder, plugin.file, code) if trust else None
    if carried_copy is None:
        problem = "is not complete" if trust else "was not submitted from this workspace, so it is not executed"
        hint = "" if trust else " Read it; then allow it with --trust."
        raise InputError(f"{run.run_id}: the code of its {kind} {plugin.name} ({code_folder}) {problem}.{hint}")
    return {carried_copy.digest: carried_copy}
