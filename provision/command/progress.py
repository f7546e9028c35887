"""Shows the progress of each node while operations run: a live table on a terminal, otherwise a line for each change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from provision.plan import OperationStep, PlanObserver, State
from shardlab.terminal.console import Output

# For each state of an operation, the letter and its color in the table. One letter per operation lets a row show all operations
# of a node.
LETTER_AND_STYLE: dict[State, tuple[str, str]] = {
    "changed": ("+", "green"),
    "would change": ("+", "yellow"),
    "nothing to do": ("=", ""),
    "skipped": ("-", "dim"),
    "administrator": ("!", "bold yellow"),
    "failed": ("x", "bold red"),
    "not reached": (" ", ""),
}
LEGEND = "+ changed   = nothing to do   ! needs an administrator   x failed   - excluded"


class NodeRow(msgspec.Struct):
    """The progress of a node: the states of its finished operations, the operation and the change that run now, and when this
    operation began."""

    finished_states: list[State] = []
    running: str | None = None
    current_change: str = ""
    since: float = 0.0
    change_count: int = 0

    def render_cells(self, operation_count: int, now_s: float) -> tuple[Text, str, str]:
        """The row of the table for this node.

        Returns (one letter for each operation, the number of changes, the running operation with its time in seconds and its
        present change).
        """
        state_letters = Text()
        for state in self.finished_states:
            state_letters.append(*LETTER_AND_STYLE[state])
        state_letters.append("." * (operation_count - len(self.finished_states)), "dim")
        running_text = f"{self.running}  {now_s - self.since:.0f} s  {self.current_change}".rstrip() if self.running else ""
        return state_letters, str(self.change_count or ""), running_text


class ProgressTable(PlanObserver):
    """A live table of the progress, with a row for each node."""

    def __init__(self, node_names: Sequence[str], operation_count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rows = {name: NodeRow() for name in node_names}
        self.operation_count = operation_count
        self._read_clock_s = clock
        self._lock = threading.Lock()

    def record_start(self, node: str, operation: str) -> None:
        with self._lock:
            self.rows[node].running, self.rows[node].since, self.rows[node].current_change = operation, self._read_clock_s(), ""

    def record_change(self, node: str, description: str) -> None:
        with self._lock:
            self.rows[node].current_change = description

    def record_end(self, step: OperationStep) -> None:
        with self._lock:
            node_row = self.rows.get(step.node, NodeRow())  # no row: --limit left out this node, but another node needs it
            node_row.running = None
            node_row.finished_states.append(step.state)
            node_row.change_count += step.changes

    def __rich__(self) -> Group:
        progress_table = Table(box=None, pad_edge=False)
        progress_table.add_column("node")
        progress_table.add_column("operations", no_wrap=True)
        progress_table.add_column("changes", justify="right")
        progress_table.add_column("now", no_wrap=True, overflow="ellipsis")
        with self._lock:
            for node_name, node_row in self.rows.items():
                progress_table.add_row(Text(node_name), *node_row.render_cells(self.operation_count, self._read_clock_s()))
        return Group(progress_table, Text(LEGEND, "dim"))


class ProgressLinePrinter(PlanObserver):
    """Prints a line for each operation that changed something, failed, or needs an administrator."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def record_end(self, step: OperationStep) -> None:
        if step.state in ("changed", "failed"):
            self._output.print_remark(f"{step.node}: {step.operation}: {step.state}")
        elif step.state == "administrator":
            self._output.print_remark(f"{step.node}: {step.operation}: needs an administrator")


@contextmanager
def show_progress(output: Output, node_names: Sequence[str], operation_count: int) -> Iterator[PlanObserver]:
    """Show the progress on standard error during the block: on a terminal as a table, which disappears at the end.

    Without a terminal, a line is printed for each operation that changed something, failed, or needs an administrator.
    """
    if not output.remarks.is_terminal:
        yield ProgressLinePrinter(output)
        return
    progress_table = ProgressTable(node_names, operation_count)
    with Live(progress_table, console=output.remarks.console, refresh_per_second=4, transient=True):
        yield progress_table
