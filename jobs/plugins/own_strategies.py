"""Finds the strategies that a workspace defines itself (WORKSPACE/strategies), and asks them which cells they refuse.

Separate processes execute the code of the strategies; `jobs` itself never does. The code is executed only if this user account
created the workspace or the user trusts the workspace. The same is true of a workspace's own workloads.
"""

from __future__ import annotations

import select
import subprocess
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from jobs.plugins import own_answers
from shardlab.errors import InputError
from shardlab.files import plugin_source
from shardlab.files.decoders import DECODE_FAULTS, decoder
from shardlab.files.plugin_source import PluginSource
from shardlab.matrix.cell import Cell
from shardlab.plugins import own_workload
from shardlab.plugins.own_strategy import FOLDER, OwnStrategy, RefusalAnswer, RefusalQuestion, StrategyDescription
from shardlab.plugins.own_workload import OwnWorkload
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace
from trainers import menu
from trainers.strategy import Strategy

FIRST_ANSWER_S, NEXT_ANSWER_S = 300.0, 30.0  # the most seconds for the first answer, with imports, and for each later one
MOST_BYTES = 1 << 16  # the most bytes of an answer


class RefusingProcess:
    """Asks a separate process which cells the strategies of a file refuse. The first question starts the process."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def refuse(self, cell: Cell, workload: OwnWorkload | None) -> str | None:
        """Why the strategy of a cell refuses the cell, as a sentence; None if it accepts the cell.

        workload: the cell's workload if the workspace defines it, else None. Raises InputError if the code fails.
        """
        with self._lock:
            try:
                answer = self._ask(RefusalQuestion(cell.strategy, cell, workload))
            except BaseException:
                self.close()
                raise
        if answer.fault:
            raise InputError(answer.fault)
        return answer.why

    def close(self) -> None:
        """End the process that answers questions. A later question starts another process."""
        if self._process is not None:
            own_answers.kill_process_group(self._process)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None

    def _ask(self, question: RefusalQuestion) -> RefusalAnswer:
        limit_s = NEXT_ANSWER_S
        if self._process is None:
            limit_s = FIRST_ANSWER_S
            self._process = subprocess.Popen(
                [own_answers.interpreter_path(), "-P", "-m", "trainers", "refuse", str(self.file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=own_answers.make_environment(),
                cwd="/", start_new_session=True,
            )  # fmt: skip
        question_pipe, answer_pipe = self._process.stdin, self._process.stdout
        assert question_pipe is not None
        assert answer_pipe is not None
        try:
            question_pipe.write(msgspec.json.encode(question) + b"\n")
            question_pipe.flush()
        except BrokenPipeError:
            raise InputError(f"{self.file}: its code ended the process that asks it which cells it refuses.") from None
        readable_pipes, _, _ = select.select([answer_pipe], [], [], limit_s)
        if not readable_pipes:
            raise InputError(f"{self.file}: refuse of {question.strategy} did not answer within {limit_s:.0f} s.")
        line = answer_pipe.readline(MOST_BYTES)
        try:
            return decoder(RefusalAnswer).decode(line)
        except DECODE_FAULTS:
            raise InputError(f"{self.file}: its code ended the process that asks it which cells it refuses.") from None


class OwnStrategies(msgspec.Struct, frozen=True):
    """The workspace's own strategies."""

    by_name: dict[str, OwnStrategy] = {}
    """The strategies, by name."""
    sources: dict[str, PluginSource] = {}
    """The files that define them, by their digest."""
    faults: dict[str, str] = {}
    """Why a file defines no strategies, by each strategy name that was looked for in the file; if no names were given, by the
    name of the file."""
    processes: dict[str, RefusingProcess] = {}
    """The processes that say which cells are refused, by the digest of the file."""

    def menu(self, workloads: Mapping[str, OwnWorkload]) -> dict[str, Strategy]:
        """Register the strategies, so that `menu.strategy_of` finds them from now on, and return their menu entries by name.

        workloads: the workspace's own workloads, by name.
        """
        entries = {name: self._make_entry(strategy, workloads) for name, strategy in self.by_name.items()}
        for entry in entries.values():
            menu.add_own_strategy(entry)
        return entries

    def find_for_cell(self, cell: Cell) -> OwnStrategy | None:
        """The strategy of a cell if the workspace defines it; None if the strategy ships with shardlab."""
        return None if cell.strategy_code is None else self.by_name[cell.strategy]

    def close(self) -> None:
        """End the processes that were asked which cells are refused."""
        for process in self.processes.values():
            process.close()

    def _make_entry(self, strategy: OwnStrategy, workloads: Mapping[str, OwnWorkload]) -> Strategy:
        process = self.processes[strategy.code]

        def refuse(cell: Cell) -> str | None:
            return process.refuse(cell, None if cell.workload_code is None else workloads.get(cell.workload))

        return Strategy(
            name=strategy.name,
            summary=strategy.summary,
            precisions=strategy.precisions,
            refuse=refuse,
            engine="",  # only the code of the file knows the engine, and only ranks execute this code
            options=strategy.options,
            degrees=strategy.degrees,
            switches=strategy.switches,
            servers=strategy.servers,
            cuts=strategy.cuts,
            tolerates_lost_ranks=strategy.tolerates_lost_ranks,
            no_checkpoints=strategy.no_checkpoints,
            reasons=strategy.reasons,
            code=strategy.code,
            file=strategy.file,
        )


def find_strategies(workspace: Workspace, names: Collection[str] | None = None) -> OwnStrategies:
    """Find the workspace's own strategies. Files that cannot define any of these names are not executed.

    names: the names to look for; None: all strategies. Raises WorkspaceError.
    """
    defined: dict[str, OwnStrategy] = {}
    sources: dict[str, PluginSource] = {}
    faults: dict[str, str] = {}
    for file in plugin_source.plugin_files(workspace.path / FOLDER):
        sought_names = {file.stem.replace("_", "-")} if names is None else {name for name in names if _may_define(file, name)}
        if not sought_names:
            continue
        try:
            source = plugin_source.read_plugin(file)
            workspace_trust.must_be_allowed(workspace, f"execute {file}")
            _must_not_share_helpers(workspace, source)
            strategies = own_answers.describe_plugin(workspace, source, StrategyDescription).strategies
            for strategy in strategies:
                _must_be_new(file, strategy.name, defined)
        except InputError as error:
            faults |= dict.fromkeys(sought_names - (set(menu.strategies()) - {file.stem.replace("_", "-")}), str(error))
            continue
        sources[source.digest] = source
        defined |= {strategy.name: msgspec.structs.replace(strategy, file=str(file)) for strategy in strategies}
    return OwnStrategies(defined, sources, faults, {code: RefusingProcess(source.file) for code, source in sources.items()})


def _may_define(file: Path, name: str) -> bool:
    """Whether a file may define a strategy with this name. The file my_way.py may define `my-way` and names that begin with
    `my-way-`."""
    base_name = file.stem.replace("_", "-")
    return name == base_name or name.startswith(f"{base_name}-")


def _must_be_new(file: Path, name: str, defined: Mapping[str, OwnStrategy]) -> None:
    """Raises InputError if a strategy with this name ships with shardlab or is defined by another file."""
    if name in menu.strategies():
        raise InputError(f"{file}: the strategy {name} ships with shardlab and cannot be replaced. Allowed: another name.")
    if name in defined:
        raise InputError(f"{file}: the strategy {name} is defined by {defined[name].file} as well. Allowed: another name.")


def _must_not_share_helpers(workspace: Workspace, source: PluginSource) -> None:
    """Raises InputError if a helper file of strategies has the same name as a helper file of workloads. A rank executes both,
    and Python would import only one of the two files."""
    workload_files = {path.name for path in plugin_source.python_files(workspace.path / own_workload.FOLDER)}
    if shared_names := sorted(name for name in source.contents if name.startswith("_") and name in workload_files):
        raise InputError(
            f"{source.file.parent / shared_names[0]}: {own_workload.FOLDER}/{shared_names[0]} has the same name, and a rank "
            "could import only one of them. Allowed: different names."
        )
