"""Rehearses steps in forked processes, several at a time.

Each step has a process of its own: torch and DeepSpeed remember process groups, so in one process, a step of another rank would
get the groups of the previous rank. A fork takes a tenth of a second; the imports of a new process would take seconds.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from shardlab.errors import ShardlabError
from shardlab.hardware import host
from trainers.rehearsal.counted_step import CountedStep
from trainers.run.process import summarize_error


class StepFailed(ShardlabError):
    """Raised if a step could not be rehearsed. The message is the error of the process that rehearsed the step."""


def rehearse_steps(steps: Sequence[Callable[[], CountedStep]]) -> list[CountedStep]:
    """Call functions that each rehearse a step, in forked processes. Returns their results in the same order. Raises StepFailed
    if a function fails."""
    with tempfile.TemporaryDirectory(prefix="shardlab-rehearsal-") as folder:
        waiting_steps, step_by_child = deque(range(len(steps))), dict[int, int]()
        try:
            while waiting_steps or step_by_child:
                while waiting_steps and len(step_by_child) < host.count_usable_processors():
                    step_number = waiting_steps.popleft()
                    step_by_child[_fork_step(steps[step_number], Path(folder, str(step_number)))] = step_number
                child, wait_status = os.wait()
                if (failed_step := step_by_child.pop(child, None)) is not None and wait_status:
                    raise StepFailed(_describe_failure(Path(folder, str(failed_step)), wait_status))
        finally:
            for child in step_by_child:
                os.kill(child, 9)
                os.waitpid(child, 0)
        return [
            msgspec.json.decode(Path(folder, str(step_number)).read_bytes(), type=CountedStep)
            for step_number in range(len(steps))
        ]


def _fork_step(step: Callable[[], CountedStep], path: Path) -> int:
    """Fork a process that calls `step` and writes the result, or a sentence about its error, to the file `path`. Returns the
    process id."""
    if (pid := os.fork()) != 0:
        return pid
    exit_code = 1
    try:
        path.write_bytes(msgspec.json.encode(step()))
        exit_code = 0
    except BaseException as error:  # noqa: BLE001 - a forked process must not return into the code of its parent
        traceback.print_exception(error)
        path.write_text(summarize_error(error))
    finally:
        os._exit(exit_code)


def _describe_failure(path: Path, status: int) -> str:
    if path.exists() and (error_text := path.read_text()):
        return error_text
    return f"the process of a step ended with {os.waitstatus_to_exitcode(status)}."
