"""Gets the results of rehearsals of cells: stored results, or new results from `python -m trainers rehearse`.

A rehearsal measures memory and traffic of one step without GPUs. A separate process makes each result (in the code: answer),
because it needs torch and may execute the code of the workspace. The answers are stored in WORKSPACE/.shardlab/rehearsals,
under a digest of everything that they depend on.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jobs.plugins.own_plugins import OwnPlugins
from shardlab.files import files, plugin_source
from shardlab.matrix.cell import AnyCell, Cell, select_trainings
from shardlab.plugins import plugin_process
from shardlab.plugins.plugin_kind import WORKLOADS
from shardlab.runs import rehearsed
from shardlab.runs.rehearsed import SCHEMA, NotRehearsed, RehearsalAnswer, RehearsalRequest
from shardlab.terminal import moments
from shardlab.terminal.console import Output
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

ANSWER_S = 1800.0  # the most seconds for one cell; a deep model at its own depth on a slow machine takes many minutes


class Rehearsals:
    """The rehearsals of the cells of one command.

    workspace: the workspace in which answers are stored. own: the plug-ins of the workspace. makes_missing: whether missing
    answers are made. full_depth: whether deep models are rehearsed at their own depth. out: prints the progress."""

    def __init__(
        self, workspace: Workspace, plugins: OwnPlugins, out: Output, *, makes_missing: bool = False, full_depth: bool = False
    ) -> None:
        self._workspace = workspace
        self._plugins = plugins
        self._out = out
        self._makes_missing = makes_missing
        self._full_depth = full_depth
        self.folder = workspace.shardlab_folder / "rehearsals"
        # failures, by the key of the answer; not stored, because a later command may succeed
        self._failures: dict[str, NotRehearsed] = {}

    def get_answers(self, cells: Sequence[AnyCell]) -> dict[str, RehearsalAnswer]:
        """The answer for each cell that has an answer, by the name of the cell. Missing answers are made if `make` is set."""
        answer_by_cell = dict[str, RehearsalAnswer]()
        if not self._makes_missing and not self.folder.is_dir():
            return answer_by_cell
        cells_by_missing_key = dict[
            str, list[Cell]
        ]()  # by key of the answer: cells that need this answer because their steps are equal
        for cell in select_trainings(cells):
            request = self._make_request(cell)
            if (stored_answer := self._read_stored(request)) is not None:
                answer_by_cell[cell.name()] = stored_answer
            elif self._makes_missing:
                cells_by_missing_key.setdefault(request.compute_cache_key(full_depth=self._full_depth), []).append(cell)
        begin_s = time.monotonic()
        for done_count, equal_cells in enumerate(cells_by_missing_key.values()):
            left_s = (
                (time.monotonic() - begin_s) / done_count * (len(cells_by_missing_key) - done_count) if done_count else None
            )
            left_text = "" if left_s is None else f", about {moments.format_duration(left_s)} left"
            self._out.print_remark(
                f"rehearsing {done_count + 1} of {len(cells_by_missing_key)}: {equal_cells[0].name()}{left_text}"
            )
            answer_by_cell |= dict.fromkeys(
                [cell.name() for cell in equal_cells], self._make_answer(self._make_request(equal_cells[0]))
            )
        return answer_by_cell

    def _make_request(self, cell: Cell) -> RehearsalRequest:
        return RehearsalRequest(cell, self._plugins.find_workload(cell), self._plugins.find_strategy(cell))

    def _read_stored(self, request: RehearsalRequest) -> RehearsalAnswer | None:
        """An answer that the workspace or this command already has; None if there is none. If no answers are made, an answer at
        full depth is preferred."""
        for full_depth in (True,) if self._full_depth else (False,) if self._makes_missing else (True, False):
            cache_key = request.compute_cache_key(full_depth=full_depth)
            if (failed_answer := self._failures.get(cache_key)) is not None:
                return failed_answer
            if (stored_answer := rehearsed.read_answer(self.folder / f"{cache_key}.json")) is not None:
                return stored_answer
        return None

    def _make_answer(self, request: RehearsalRequest) -> RehearsalAnswer:
        """Start a process that makes a new answer and stores it. If the process fails, the answer contains the reason."""
        started_s = time.monotonic()
        workspace_trust.begin_workspace(self._workspace)
        files.make_folder(self.folder)
        with tempfile.TemporaryDirectory(prefix="shardlab-rehearsal-") as request_folder:
            request_path, answer_path = Path(request_folder, "request.json"), Path(request_folder, "answer.json")
            error_path = Path(request_folder, "said")
            request_path.write_bytes(msgspec.json.encode(request))
            if (workload := request.own_workload) is not None and workload.is_data:
                plugin_source.write_plugin(
                    Path(request_folder, WORKLOADS.folder), self._plugins.workloads.source_by_digest[workload.code]
                )
            end_reason = self._run_process(request_path, answer_path, error_path)
            made_answer = rehearsed.read_answer(answer_path)
            if made_answer is None:
                last_line = plugin_process.read_last_line(error_path)
                end_reason = f"the rehearsal failed: {end_reason or last_line or 'its process gave no answer'}"
                made_answer = NotRehearsed(SCHEMA, request.cell.hash(), end_reason, time.monotonic() - started_s)
        if isinstance(made_answer, NotRehearsed):
            self._failures[request.compute_cache_key(full_depth=self._full_depth)] = made_answer
        return made_answer

    def _run_process(self, request_path: Path, answer_path: Path, error_path: Path) -> str:
        """Run the process that makes an answer. Returns a sentence that says why the process was ended; '' if it ended by
        itself.

        request_path: the request. answer_path: the file for the answer. error_path: the file for the errors that the process
        prints."""
        command_words = ["trainers", "rehearse", str(request_path), "--cache", str(self.folder)]
        depth_options = ["--full-depth"] if self._full_depth else []
        argv = [plugin_process.find_interpreter(), "-P", "-W", "ignore", "-m", *command_words, *depth_options]
        exit_code = plugin_process.run_process(argv, request_path.parent, answer_path, ANSWER_S, error_path)
        return f"it did not end within {ANSWER_S:.0f} s." if exit_code is None else ""


def describe_refused_rehearsals(answer_by_cell: dict[str, RehearsalAnswer]) -> list[str]:
    """A sentence for each reason why cells were not rehearsed."""
    cells_by_reason: dict[str, list[str]] = {}
    for cell_name, answer in answer_by_cell.items():
        if isinstance(answer, NotRehearsed):
            cells_by_reason.setdefault(answer.why, []).append(cell_name)
    return [f"not rehearsed, so predicted by formula: {', '.join(names)}: {why}" for why, names in cells_by_reason.items()]
