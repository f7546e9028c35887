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

FIRST_S, NEXT_S = 300.0, 30.0  # the most seconds for the first answer, which includes imports, and for each later answer
MOST_BYTES = 1 << 16  # the most bytes of an answer


class RefusingProcess:
    """Asks a separate process which cells the strategies of a file refuse. The first question starts the process."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._process: subprocess.Popen[bytes] | None = None
        self._alone = threading.Lock()

    def refuse(self, cell: Cell, workload: OwnWorkload | None) -> str | None:
        """Why the strategy of a cell refuses the cell, as a sentence; None if it accepts the cell.

        workload: the cell's workload if the workspace defines it, else None. Raises InputError if the code fails.
        """
        with self._alone:
            try:
                found = self._asked(RefusalQuestion(cell.strategy, cell, workload))
            except BaseException:
                self.close()
                raise
        if found.fault:
            raise InputError(found.fault)
        return found.why

    def close(self) -> None:
        """End the process that answers questions. A later question starts another process."""
        if self._process is not None:
            own_answers.end(self._process)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None

    def _asked(self, question: RefusalQuestion) -> RefusalAnswer:
        limit_s = NEXT_S
        if self._process is None:
            limit_s = FIRST_S
            self._process = subprocess.Popen(
                [own_answers.python(), "-P", "-m", "trainers", "refuse", str(self.file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=own_answers.environment(),
                cwd="/", start_new_session=True,
            )  # fmt: skip
        told, answers = self._process.stdin, self._process.stdout
        assert told is not None
        assert answers is not None
        try:
            told.write(msgspec.json.encode(question) + b"\n")
            told.flush()
        except BrokenPipeError:
            raise InputError(f"{self.file}: its code ended the process that asks it which cells it refuses.") from None
        ready, _, _ = select.select([answers], [], [], limit_s)
        if not ready:
            raise InputError(f"{self.file}: refuse of {question.strategy} did not answer within {limit_s:.0f} s.")
        line = answers.readline(MOST_BYTES)
        try:
            return decoder(RefusalAnswer).decode(line)
        except DECODE_FAULTS:
            raise InputError(f"{self.file}: its code ended the process that asks it which cells it refuses.") from None


class OwnStrategies(msgspec.Struct, frozen=True):
    """The workspace's own strategies.

    known: the strategies, by name.
    sources: the files that define them, by their digest.
    faults: why a file defines no strategies, by each strategy name that was looked for in the file; if no names were given, by
        the name of the file.
    asked: the processes that say which cells are refused, by the digest of the file.
    """

    known: dict[str, OwnStrategy] = {}
    sources: dict[str, PluginSource] = {}
    faults: dict[str, str] = {}
    asked: dict[str, RefusingProcess] = {}

    def menu(self, workloads: Mapping[str, OwnWorkload]) -> dict[str, Strategy]:
        """Register the strategies, so that `menu.strategy_of` finds them from now on, and return their menu entries by name.

        workloads: the workspace's own workloads, by name.
        """
        found = {name: self._entry(known, workloads) for name, known in self.known.items()}
        for made in found.values():
            menu.add_own_strategy(made)
        return found

    def of(self, cell: Cell) -> OwnStrategy | None:
        """The strategy of a cell if the workspace defines it; None if the strategy ships with shardlab."""
        return None if cell.strategy_code is None else self.known[cell.strategy]

    def close(self) -> None:
        """End the processes that were asked which cells are refused."""
        for process in self.asked.values():
            process.close()

    def _entry(self, known: OwnStrategy, workloads: Mapping[str, OwnWorkload]) -> Strategy:
        process = self.asked[known.code]

        def refuse(cell: Cell) -> str | None:
            return process.refuse(cell, None if cell.workload_code is None else workloads.get(cell.workload))

        return Strategy(
            name=known.name,
            summary=known.summary,
            precisions=known.precisions,
            refuse=refuse,
            engine="",  # only the code of the file knows the engine, and only ranks execute this code
            options=known.options,
            degrees=known.degrees,
            switches=known.switches,
            servers=known.servers,
            cuts=known.cuts,
            tolerates_lost_ranks=known.tolerates_lost_ranks,
            no_checkpoints=known.no_checkpoints,
            reasons=known.reasons,
            code=known.code,
            file=known.file,
        )


def find(workspace: Workspace, names: Collection[str] | None = None) -> OwnStrategies:
    """Find the workspace's own strategies. Files that cannot define any of these names are not executed.

    names: the names to look for; None: all strategies. Raises WorkspaceError.
    """
    known: dict[str, OwnStrategy] = {}
    sources: dict[str, PluginSource] = {}
    faults: dict[str, str] = {}
    for file in plugin_source.files_in(workspace.path / FOLDER):
        wanted = {file.stem.replace("_", "-")} if names is None else {name for name in names if _may_define(file, name)}
        if not wanted:
            continue
        try:
            source = plugin_source.read(file)
            workspace_trust.must_be_allowed(workspace, f"execute {file}")
            _must_not_share_helpers(workspace, source)
            found = own_answers.described(workspace, source, StrategyDescription).strategies
            for one in found:
                _must_be_new(file, one.name, known)
        except InputError as error:
            faults |= dict.fromkeys(wanted - (set(menu.strategies()) - {file.stem.replace("_", "-")}), str(error))
            continue
        sources[source.digest] = source
        known |= {one.name: msgspec.structs.replace(one, file=str(file)) for one in found}
    return OwnStrategies(known, sources, faults, {code: RefusingProcess(source.file) for code, source in sources.items()})


def _may_define(file: Path, name: str) -> bool:
    """Whether a file may define a strategy with this name. The file my_way.py may define `my-way` and names that begin with
    `my-way-`."""
    first = file.stem.replace("_", "-")
    return name == first or name.startswith(f"{first}-")


def _must_be_new(file: Path, name: str, known: Mapping[str, OwnStrategy]) -> None:
    """Raises InputError if a strategy with this name ships with shardlab or is defined by another file."""
    if name in menu.strategies():
        raise InputError(f"{file}: the strategy {name} ships with shardlab and cannot be replaced. Allowed: another name.")
    if name in known:
        raise InputError(f"{file}: the strategy {name} is defined by {known[name].file} as well. Allowed: another name.")


def _must_not_share_helpers(workspace: Workspace, source: PluginSource) -> None:
    """Raises InputError if a helper file of strategies has the same name as a helper file of workloads. A rank executes both,
    and Python would import only one of the two files."""
    other = {path.name for path in plugin_source.python_files(workspace.path / own_workload.FOLDER)}
    if both := sorted(name for name in source.contents if name.startswith("_") and name in other):
        raise InputError(
            f"{source.file.parent / both[0]}: {own_workload.FOLDER}/{both[0]} has the same name, and a rank could import only "
            "one of them. Allowed: different names."
        )
