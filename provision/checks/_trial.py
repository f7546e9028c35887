"""Runs all checks of torch on a node with one import of torch: the checks run in child processes, forked after the import.

A check that crashes or hangs does not affect the other checks. The parent process never uses a GPU: if the parent initialized
CUDA, its forked children could not use CUDA.
``python -m provision.checks._trial`` prints a provision.checks.trial.Trial as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from provision.checks.trial import COMPILED_S, INSPECT_S, PRODUCT_S, RANKS_S, TRIAL_RANKS, Trial
from provision.facts import _torch
from provision.facts.torch import Torch, parse
from provision.node import find_error_line
from shardlab.remote.remote import CommandOutput

GRACE_S = 2.0  # after a rank has failed, the other ranks are killed this many seconds later


def main() -> None:
    """Run the checks of torch on this machine, and print the results (a Trial) as JSON."""
    trial = try_torch()
    sys.stdout.write(msgspec.json.encode(trial).decode() + "\n")


def try_torch() -> Trial:
    """Import torch once, and run each check of torch in child processes."""
    with contextlib.suppress(Exception):  # if the import fails, the first child process reports the error
        import torch
        import torch.distributed  # noqa: F401 (imported before the fork)
    torch_output = run_in_children([_torch.main], INSPECT_S)
    if torch_output.code != 0:
        failure_text = f"it did not end within {INSPECT_S:g} s" if torch_output.code is None else find_error_line(torch_output)
        return Trial(Torch(why_absent=f"it fails when it looks for GPUs: {failure_text}"))
    torch_state = parse(torch_output.stdout)
    if torch_state.version is None or not torch_state.backends:
        return Trial(torch_state)
    with tempfile.TemporaryDirectory(prefix="shardlab-") as store_folder:
        backend = "nccl" if torch_state.gpus and torch_state.gpus >= TRIAL_RANKS and "nccl" in torch_state.backends else "gloo"
        store_url = f"file://{store_folder}/store"
        rank_functions = [functools.partial(_run_rank, backend, rank, store_url) for rank in range(TRIAL_RANKS)]
        reduce_output = run_in_children(rank_functions, RANKS_S)
    if not torch_state.gpus:
        return Trial(torch_state, reduce_output)
    return Trial(
        torch_state, reduce_output, run_in_children([_check_matmul], PRODUCT_S), run_in_children([_check_compile], COMPILED_S)
    )


def _run_rank(backend: str, rank: int, store_url: str) -> None:
    from provision.checks import _all_reduce_ranks

    _all_reduce_ranks.run_rank(backend, rank, TRIAL_RANKS, store_url)


def _check_matmul() -> None:
    from provision.checks import _matmul

    _matmul.main()


def _check_compile() -> None:
    from provision.checks import _compiled

    # torch.compile gets empty caches: with cached kernels of an earlier check, it would need no compiler on this node.
    with tempfile.TemporaryDirectory(prefix="shardlab-") as cache_folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache_folder}/inductor", "TRITON_CACHE_DIR": f"{cache_folder}/triton"}
        _compiled.main()


def run_in_children(child_functions: Sequence[Callable[[], None]], time_limit_s: float) -> CommandOutput:
    """Run each function in a child process, in parallel. Returns the output of a child that failed, or, if no child failed, of
    the first child.

    The exit code in the result is None if a child was killed after `time_limit_s` seconds.
    """
    with contextlib.ExitStack() as open_files:
        stream_pairs = [
            (open_files.enter_context(tempfile.TemporaryFile()), open_files.enter_context(tempfile.TemporaryFile()))
            for _ in child_functions
        ]
        child_pids = [_fork_child(function, *streams) for function, streams in zip(child_functions, stream_pairs, strict=True)]
        exit_code_by_pid = _wait_for_children(child_pids, time_limit_s)
        reported_pid = next((child for child in child_pids if exit_code_by_pid[child] not in (0, None)), None)
        if reported_pid is None:
            reported_pid = next((child for child in child_pids if exit_code_by_pid[child] is None), child_pids[0])
        stdout, stderr = (_read_stream(stream) for stream in stream_pairs[child_pids.index(reported_pid)])
        return CommandOutput(exit_code_by_pid[reported_pid], stdout, stderr)


def _fork_child(run_child: Callable[[], None], stdout: IO[bytes], stderr: IO[bytes]) -> int:
    child_pid = os.fork()
    if child_pid:
        return child_pid
    exit_code = 1
    try:
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        run_child()
        sys.stdout.flush()
        exit_code = 0
    except BaseException:  # noqa: BLE001 (the child must exit here and never return into the code of its parent)
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(exit_code)


def _wait_for_children(child_pids: Sequence[int], time_limit_s: float) -> dict[int, int | None]:
    """Wait for the children. Returns the exit code of each child; None: the child was killed at the time limit."""
    exit_code_by_pid: dict[int, int | None] = {}
    deadline = time.monotonic() + time_limit_s
    while len(exit_code_by_pid) < len(child_pids) and time.monotonic() < deadline:
        for child_pid in child_pids:
            if child_pid not in exit_code_by_pid and (wait_result := os.waitpid(child_pid, os.WNOHANG))[0]:
                exit_code_by_pid[child_pid] = os.waitstatus_to_exitcode(wait_result[1])
                if exit_code_by_pid[child_pid]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.01)
    for child_pid in child_pids:
        if child_pid not in exit_code_by_pid:
            os.kill(child_pid, signal.SIGKILL)
            os.waitpid(child_pid, 0)
            exit_code_by_pid[child_pid] = None
    return exit_code_by_pid


def _read_stream(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode("utf-8", "replace")


if __name__ == "__main__":
    main()
