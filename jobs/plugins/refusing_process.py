"""Asks a separate process, which executes the code of a workspace's own strategies, which cells they refuse."""

from __future__ import annotations

import select
import subprocess
import threading
from pathlib import Path

import msgspec

from shardlab.errors import InputError
from shardlab.files.decoders import DECODE_FAULTS, get_decoder
from shardlab.matrix.cell import Cell
from shardlab.plugins import plugin_process
from shardlab.plugins.plugin_kind import OwnWorkload, RefusalAnswer, RefusalQuestion

FIRST_ANSWER_S, NEXT_ANSWER_S = 300.0, 30.0  # the most seconds for the first answer, with imports, and for each later one
MOST_ANSWER_BYTES = 1 << 16  # the most bytes of an answer


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
                answer = self._ask_process(RefusalQuestion(cell.strategy, cell, workload))
            except BaseException:
                self.close()
                raise
        if answer.fault:
            raise InputError(answer.fault)
        return answer.why

    def close(self) -> None:
        """End the process that answers questions. A later question starts another process."""
        if self._process is not None:
            plugin_process.kill_process_group(self._process)
            for process_pipe in (self._process.stdin, self._process.stdout):
                assert process_pipe is not None
                process_pipe.close()
            self._process = None

    def _ask_process(self, question: RefusalQuestion) -> RefusalAnswer:
        limit_s = NEXT_ANSWER_S
        if self._process is None:
            limit_s = FIRST_ANSWER_S
            self._process = subprocess.Popen(
                [plugin_process.interpreter_path(), "-P", "-m", "trainers", "refuse", str(self.file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=plugin_process.make_environment(),
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
        answer_line = answer_pipe.readline(MOST_ANSWER_BYTES)
        try:
            return get_decoder(RefusalAnswer).decode(answer_line)
        except DECODE_FAULTS:
            raise InputError(f"{self.file}: its code ended the process that asks it which cells it refuses.") from None
