"""Handles Ctrl-C and SIGTERM while nodes are inspected or changed: ends the commands on the nodes, reports it, and exits."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from provision.node import Node
from shardlab.terminal import command_start

LIMIT_S = 1.2  # the most seconds for commands on nodes to end, so that this process ends within two seconds
CHILDREN_S = 0.7
IS_STOPPING = threading.Event()  # set when this process is interrupted: from then on no node starts a command
AGAIN_ADVICE = "run the same command again to continue"


@contextlib.contextmanager
def handle_interruption(nodes: Sequence[Node], count_changes: Callable[[], int | None]) -> Iterator[None]:
    """During the block, Ctrl-C and SIGTERM end the commands on the nodes and then this process.

    count_changes: returns the number of changes begun so far; None if they are not counted. The signal raises no exception:
    after an exception, the block would wait too long for its worker threads, and report their work as failed.
    """
    end_thread = threading.Thread(target=_end_commands_and_exit, args=(nodes, count_changes), name="interruption")

    def interrupt_commands() -> None:
        command_start.set_signal_action(
            lambda: command_start.exit_now("interrupted again: commands on the nodes may still run.")
        )
        IS_STOPPING.set()
        end_thread.start()

    command_start.set_signal_action(interrupt_commands)
    try:
        yield
    finally:
        if IS_STOPPING.is_set():
            end_thread.join()  # waits until `end_thread` ends this process
        command_start.set_signal_action(
            lambda: command_start.exit_now("interrupted while the result was printed; the work itself had ended.")
        )


def _end_commands_and_exit(nodes: Sequence[Node], count_changes: Callable[[], int | None]) -> None:
    """End all commands on the nodes in parallel, report which of them ended, and end this process."""
    busy = [node for node in nodes if node.running]
    # All nodes, because a node on which no command runs may have an open connection.
    end_threads = [threading.Thread(target=node.end_commands, args=(LIMIT_S,), daemon=True) for node in nodes]
    end_threads.append(threading.Thread(target=_end_children, daemon=True))
    deadline = time.monotonic() + LIMIT_S + 0.1
    for thread in end_threads:
        thread.start()
    for thread in end_threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # shows the cursor again, because the table of progress hides the cursor
    command_start.exit_now(
        describe_interruption(count_changes(), [node.name for node in busy], {node.name: node.running for node in busy})
    )


def describe_interruption(change_count: int | None, busy: Sequence[str], left_by_node: dict[str, tuple[str, ...]]) -> str:
    """The sentence that is printed after an interruption.

    change_count: the number of changes begun; None if they are not counted.
    busy: the nodes on which a command ran when the signal came.
    left_by_node: by node, the commands that had not ended when this process ended.
    """
    first_sentence = {None: f"interrupted; {AGAIN_ADVICE}", 0: "interrupted; nothing was changed"}.get(
        change_count, f"interrupted after {change_count} change{'' if change_count == 1 else 's'} had begun; {AGAIN_ADVICE}"
    )
    ended_nodes = [node_name for node_name in busy if not left_by_node.get(node_name)]
    sentences = [first_sentence]
    if ended_nodes:
        sentences.append(f"the commands on {', '.join(ended_nodes)} were ended")
    sentences += [
        f"on {node_name} these commands may run until they end or reach their time limit: {', '.join(commands)}"
        for node_name, commands in left_by_node.items()
        if commands
    ]
    return "; ".join(sentences) + "."


def _end_children() -> None:
    """End the programs that this process started on this machine, such as debootstrap.

    Practice nodes are not ended, because they run in sessions of their own.
    """
    import psutil

    session_id = os.getsid(0)
    terminated_processes = []
    for child_process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(child_process.pid) == session_id:
                child_process.terminate()
                terminated_processes.append(child_process)
    for child_process in psutil.wait_procs(terminated_processes, CHILDREN_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child_process.kill()
