"""The progress of each node, as a table on a terminal and as lines elsewhere; and how many nodes are changed at the same
time."""

import io
import threading

import pytest
from rich.console import Console
from support_e2e import HANG_S

from provision.cli import main
from provision.command import progress
from provision.fact import FactAnswers
from provision.nodes.local_node import LocalNode
from provision.operation import LocalCall, Nothing, Operation, Site, Target
from provision.plan import OperationStep, PlanObserver, converge_site
from shardlab.terminal.console import Output


def output(*, terminal: bool) -> Output:
    said = Output()
    said.remarks.file = io.StringIO()
    said.remarks.is_terminal = terminal
    said.remarks.console = Console(
        file=said.remarks.file, force_terminal=terminal, width=100, color_system=None, legacy_windows=False
    )
    return said


def step(node, operation, state, changes=0):
    return OperationStep(node, operation, state, [], changes)


def drawn(table: progress.ProgressTable) -> list[str]:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_progress_has_a_row_per_node_and_a_letter_per_operation():
    """The progress table has one row for each node and one letter for the state of each operation."""
    seconds = iter([10.0, 20.0, 31.0, 31.0, 31.0])
    table = progress.ProgressTable(["head", "w1", "[red]"], 4, lambda: next(seconds))
    table.record_start("head", "space")
    table.record_end(step("head", "space", "nothing to do"))
    table.record_end(step("head", "packages", "changed", 2))
    table.record_start("head", "hosts")
    table.record_change("head", "write /etc/hosts")
    table.record_end(step("w1", "space", "failed"))
    table.record_end(step("w1", "packages", "not reached"))
    assert drawn(table) == [
        "node   operations  changes  now",
        "head   =+..              2  hosts  11 s  write /etc/hosts",
        "w1     x ..",
        "[red]  ....",
        "+ changed   = nothing to do   ! needs an administrator   x failed   - excluded",
    ]


def test_the_progress_table_on_a_terminal_is_erased_at_the_end():
    """On a terminal, the progress table is drawn while `provision` works and erased at the end."""
    said = output(terminal=True)
    with progress.show_progress(said, ["head"], 1) as watch:
        watch.record_start("head", "space")
        watch.record_end(step("head", "space", "changed", 1))
    text = said.remarks.file.getvalue()
    assert "operations" in text
    assert text.endswith("\x1b[2K")  # the last line of the table is erased again


def test_the_progress_in_a_pipe_is_printed_as_lines():
    said = output(terminal=False)
    with progress.show_progress(said, ["head"], 3) as watch:
        watch.record_start("head", "space")
        for operation, state in (("space", "nothing to do"), ("packages", "changed"), ("hosts", "failed")):
            watch.record_end(step("head", operation, state))
    assert said.remarks.file.getvalue() == "head: packages: changed\nhead: hosts: failed\n"


def targets(count):
    nodes = [LocalNode(f"w{number}") for number in range(count)]
    return [Target(node, FactAnswers(node)) for node in nodes]


def test_by_default_all_nodes_are_changed_at_once():
    nodes = targets(20)
    all_there = threading.Barrier(20, timeout=HANG_S)
    operation = Operation("meet", lambda site, target: [LocalCall("meet the others", all_there.wait)])
    steps = converge_site(Site(None, None, nodes), [operation], targets=nodes, only_names={"meet"}, is_dry_run=False)
    assert {one.state for one in steps} == {"changed"}


def test_an_observer_hears_of_each_change_before_it_is_made():
    class Heard(PlanObserver):
        def __init__(self):
            self.events = []

        def record_change(self, node, description):
            self.events.append(f"{node}: {description}")

    heard = Heard()
    changes = [LocalCall(name, lambda name=name: heard.events.append(f"made {name}")) for name in ("one", "two")]
    operation = Operation("both", lambda site, target: changes)
    converge_site(
        Site(None, None, targets(1)), [operation], targets=targets(1), only_names={"both"}, is_dry_run=False, observer=heard
    )
    assert heard.events == ["w0: one", "made one", "w0: two", "made two"]


def test_parallel_limits_the_nodes_that_are_changed_at_once():
    class Seen(PlanObserver):
        now, most, lock = 0, 0, threading.Lock()

        def record_start(self, node, operation):
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)

        def record_end(self, step):
            with self.lock:
                self.now -= 1

    nodes, seen, pair = targets(8), Seen(), threading.Barrier(2, timeout=HANG_S)
    operation = Operation("meet", lambda site, target: Nothing(str(pair.wait())))
    converge_site(
        Site(None, None, nodes),
        [operation],
        targets=nodes,
        only_names={"meet"},
        is_dry_run=False,
        max_parallel=2,
        observer=seen,
    )
    assert seen.most == 2


@pytest.mark.parametrize("count", ["0", "-1", "two", ""])
def test_parallel_refuses_everything_but_a_positive_number(count, capsys):
    """--parallel refuses everything except a whole number of 1 or more."""
    with pytest.raises(SystemExit) as end:
        main(["examples/local.yaml", f"--parallel={count}"])
    assert end.value.code == 2
    assert f"found {count!r}. Allowed: a whole number, 1 or more" in capsys.readouterr().err
