"""Forks processes from a parent process that has imported all libraries but has never initialized CUDA.

A forked rank starts in one second instead of twenty. CUDA does not work in a child process if the parent has initialized CUDA.
Therefore everything that needs a GPU runs in a child, and the parent only waits.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # sys/prctl.h
KILLED = -signal.SIGKILL  # the exit code of a process that was killed because it ran for too long
GRACE_S = 20.0  # time that the other ranks have to end after a rank has failed


def fork(work: Callable[[], object], log: Path) -> int:
    """Fork a child process that calls `work`. Returns the process id of the child. The output of the child goes to the log.

    The exit code of the child is 0, or 1 if `work` raised an exception; the traceback is then in the log.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank must not stay on the GPU if the proof is killed
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - every exception is printed to the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def join(children: Sequence[int], limit_s: float) -> list[int]:
    """Wait for processes. Returns their exit codes; the code of a process that a signal killed is minus the signal number.

    children: process ids. All processes are killed when the time limit is over, or GRACE_S seconds after one of them has
    failed, as launchers do.
    """
    codes: dict[int, int] = {}
    ends = time.monotonic() + limit_s
    while len(codes) < len(children):
        for child in set(children) - codes.keys():
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    ends = min(ends, time.monotonic() + GRACE_S)
        if time.monotonic() > ends:
            for child in set(children) - codes.keys():
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[child] for child in children]


def answer(work: Callable[[], Any], limit_s: float, log: Path) -> tuple[int, Any]:
    """Call `work` in a forked process. Returns (exit code, result of `work`), with the result None if `work` failed.

    The result must be a value that JSON can store.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.json"
        (code,) = join([fork(lambda: file.write_text(json.dumps(work())), log)], limit_s)
        return code, json.loads(file.read_text()) if code == 0 else None


def ranks(run: Path, world_size: int, limit_s: float, prepare: Callable[[int], None] = lambda rank: None) -> list[int]:
    """Fork the ranks of a run, wait for them, and return their exit codes.

    run: the folder of the run. prepare: a function that each rank calls first, with its rank number.
    """
    from trainers.run import process

    with tempfile.TemporaryDirectory() as meeting:

        def rank(number: int) -> None:
            os.environ.update({
                "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size), "SHARDLAB_STORE": f"{meeting}/store",
            })  # fmt: skip
            prepare(number)
            process.run_rank(run)

        log = run / "log" / "forked.log"
        log.parent.mkdir(exist_ok=True)
        return join([fork(lambda number=number: rank(number), log) for number in range(world_size)], limit_s)
