"""Gets the results of rehearsals of cells: stored results, or new results from `python -m trainers rehearse`.

A rehearsal measures memory and traffic of one step without GPUs. A separate process makes each result (in the code: answer),
because it needs torch and may execute the code of the workspace. The answers are stored in WORKSPACE/.shardlab/rehearsals,
under a digest of everything that they depend on.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jobs.plugins import own_answers
from jobs.plugins.own_plugins import OwnPlugins
from shardlab.files import files, plugin_source
from shardlab.matrix.cell import Cell
from shardlab.plugins import own_workload
from shardlab.runs import rehearsed
from shardlab.runs.rehearsed import SCHEMA, Answer, NotRehearsed, RehearsalRequest
from shardlab.terminal import moments
from shardlab.terminal.console import Output
from shardlab.workspace import workspace_trust
from shardlab.workspace.workspace import Workspace

ANSWER_S = 1800.0  # the most seconds for one cell; a deep model at its own depth on a slow machine takes many minutes


class Rehearsals:
    """The rehearsals of the cells of one command.

    workspace: the workspace in which answers are stored. own: the plug-ins of the workspace. make: whether missing answers are
    made. full_depth: whether deep models are rehearsed at their own depth. out: prints the progress.
    """

    def __init__(
        self, workspace: Workspace, own: OwnPlugins, out: Output, *, make: bool = False, full_depth: bool = False
    ) -> None:
        self._workspace, self._own, self._out, self._make, self._full_depth = workspace, own, out, make, full_depth
        self.folder = workspace.own / "rehearsals"
        # failures, by the key of the answer; not stored, because a later command may succeed
        self._failed: dict[str, NotRehearsed] = {}

    def of(self, cells: Sequence[Cell]) -> dict[str, Answer]:
        """The answer for each cell that has an answer, by the name of the cell. Missing answers are made if `make` is set."""
        found = dict[str, Answer]()
        if not self._make and not self.folder.is_dir():
            return found
        missing = dict[str, list[Cell]]()  # by key of the answer: cells that need this answer because their steps are equal
        for cell in cells:
            request = self._request(cell)
            if (answer := self._stored(request)) is not None:
                found[cell.name()] = answer
            elif self._make:
                missing.setdefault(request.key(full_depth=self._full_depth), []).append(cell)
        began = time.monotonic()
        for number, alike in enumerate(missing.values()):
            left_s = (time.monotonic() - began) / number * (len(missing) - number) if number else None
            left = "" if left_s is None else f", about {moments.duration(left_s)} left"
            self._out.remark(f"rehearsing {number + 1} of {len(missing)}: {alike[0].name()}{left}")
            found |= dict.fromkeys([cell.name() for cell in alike], self._made(self._request(alike[0])))
        return found

    def _request(self, cell: Cell) -> RehearsalRequest:
        return RehearsalRequest(cell, self._own.workloads.of(cell), self._own.strategies.of(cell))

    def _stored(self, request: RehearsalRequest) -> Answer | None:
        """An answer that the workspace or this command already has; None if there is none. If no answers are made, an answer at
        full depth is preferred."""
        for full_depth in (True,) if self._full_depth else (False,) if self._make else (True, False):
            key = request.key(full_depth=full_depth)
            if (failed := self._failed.get(key)) is not None:
                return failed
            if (stored := rehearsed.read(self.folder / f"{key}.json")) is not None:
                return stored
        return None

    def _made(self, request: RehearsalRequest) -> Answer:
        """Start a process that makes a new answer and stores it. If the process fails, the answer contains the reason."""
        began = time.monotonic()
        workspace_trust.begin(self._workspace)
        files.make_folder(self.folder)
        with tempfile.TemporaryDirectory(prefix="shardlab-rehearsal-") as folder:
            file, answer, said = Path(folder, "request.json"), Path(folder, "answer.json"), Path(folder, "said")
            file.write_bytes(msgspec.json.encode(request))
            if (workload := request.own_workload) is not None and workload.is_data:
                plugin_source.write(file.parent / own_workload.FOLDER, self._own.workloads.sources[workload.code])
            why = self._run(file, answer, said)
            found = rehearsed.read(answer)
            if found is None:
                last = own_answers.last_line(said)
                why = f"the rehearsal failed: {why or last or 'its process gave no answer'}"
                found = NotRehearsed(SCHEMA, request.cell.hash(), why, time.monotonic() - began)
        if isinstance(found, NotRehearsed):
            self._failed[request.key(full_depth=self._full_depth)] = found
        return found

    def _run(self, file: Path, answer: Path, said: Path) -> str:
        """Run the process that makes an answer. Returns a sentence that says why the process was ended; '' if it ended by
        itself.

        file: the request. answer: the file for the answer. said: the file for the errors that the process prints.
        """
        command = [own_answers.python(), "-P", "-W", "ignore", "-m", "trainers", "rehearse"]
        depth = ["--full-depth"] if self._full_depth else []
        with answer.open("wb") as standard_output, said.open("wb") as errors:
            process = subprocess.Popen(
                [*command, str(file), "--cache", str(self.folder), *depth], stdin=subprocess.DEVNULL, stdout=standard_output,
                stderr=errors, cwd=file.parent, env=own_answers.environment(), start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                return f"it did not end within {ANSWER_S:.0f} s."
            finally:
                own_answers.end(process)
        return ""


def refused(answers: dict[str, Answer]) -> list[str]:
    """A sentence for each reason why cells were not rehearsed."""
    names: dict[str, list[str]] = {}
    for name, answer in answers.items():
        if isinstance(answer, NotRehearsed):
            names.setdefault(answer.why, []).append(name)
    return [f"not rehearsed, so predicted by formula: {', '.join(cells)}: {why}" for why, cells in names.items()]
