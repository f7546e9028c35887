"""Details of figures and tables: how points of long lines are left out, which rows are shown, how processor time is counted."""

import msgspec
import pytest
import support_collect as support
import support_traces

from collect.cli import main
from collect.drawing import traces
from collect.figures import bubble
from collect.sampler import host
from collect.verdicts import printed_number
from shardlab.workspace.workspace import Workspace
from tests.collect.figures.test_collect_figures_traces import drawn


def test_a_thinned_line_with_gaps_has_as_many_points_as_are_allowed():
    """`traces.thin_points` keeps three points of each interval of a line: its smallest value, its largest value and a gap."""
    y = [None if place % 10 == 5 else float(place * 7919 % 3000) for place in range(3000)]
    x, _ = traces.thin_points(range(3000), y, 100)
    assert 97 <= len(x) <= 102


def test_a_thinned_line_without_gaps_has_as_many_points_as_are_allowed():
    x, _ = traces.thin_points(range(3000), [float(place * 7919 % 3000) for place in range(3000)], 100)
    assert 97 <= len(x) <= 100


def test_a_mark_of_a_bubble_is_drawn_only_under_its_own_strategy(tmp_path):
    workspace = Workspace(tmp_path)
    support.complete_pipelines(workspace)
    single, *cells = (run.cell for run in (folder.read_run() for folder in workspace.list_run_dirs()))
    cells = [cell for cell in (single, *cells) if cell.pp == 2]
    other = msgspec.structs.replace(cells[0], strategy="pp-1f1b")
    support.keep(workspace, [support.cell(), *cells, other], 1)
    folder = support.completed(workspace, other)
    for rank in (0, 1):
        like = workspace.runs / next(f.run_id for f in workspace.list_run_dirs() if f.read_run().cell == cells[0])
        folder.steps_file(rank).write_bytes((like / "steps" / folder.steps_file(rank).name).read_bytes())
    found, _ = drawn(workspace, bubble.draw)
    points = {trace["name"]: len(trace["x"]) for trace in found.data}
    assert (points["pp-gpipe, P = 2"], points["pp-1f1b, P = 2"]) == (2, 1)


def test_kernels_are_listed_by_their_time_and_not_by_their_number(tmp_path, capsys):
    """The table lists the kernel with the largest total time first, and says how many kernels it does not show."""
    rank = support_traces.Rank(0, steps=0)
    at = begin = support_traces.NEW
    for number in range(30):
        for _ in range(30 - number):
            rank._launch("kernel", f"kernel{number:02d}", 7, at, (number + 1) * 100_000)
            at += (number + 1) * 100_000
    rank._add("user_annotation", "ProfilerStep#1", begin, at - begin)
    rank.write(tmp_path)
    assert main(["trace", f"{tmp_path}/", "--workspace", str(tmp_path / "w")]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if line.startswith("kernels (on CPU: operators"))
    shown = [line.split() for line in lines[lines.index(heading) + 2 :] if line.startswith("kernel")]
    totals = [float(words[2].replace(",", "")) for words in shown]
    assert totals == sorted(totals, reverse=True)
    assert shown[0][0] == "kernel15"  # 15 calls of 1.6 ms: the largest total time
    assert f"; {30 - len(shown)} more in --json" in heading


def test_differences_of_traces_beyond_one_screen_are_counted(tmp_path, capsys):
    for name, kernels in (("a", 40), ("b", 3)):
        rank = support_traces.Rank(0, steps=0)
        at = begin = support_traces.NEW
        for number in range(kernels):
            rank._launch("kernel", f"{name}{number:02d}", 7, at, 100_000)
            at += 100_000
        rank._add("user_annotation", "ProfilerStep#1", begin, at - begin)
        (tmp_path / name).mkdir()
        rank.write(tmp_path / name)
    words = ["trace", f"{tmp_path}/a/", "--against", f"{tmp_path}/b/", "--workspace", str(tmp_path / "w")]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    title = next(line for line in lines if "per step and rank: " in line)
    shown = sum(line.startswith(("new ", "gone ")) for line in lines[lines.index(title) :])
    new, gone = (int(title.split(f" {word}")[0].split()[-1]) for word in ("new", "gone"))
    assert (new, gone) == (40, 3)
    assert shown < 43
    assert int(title.split("; ")[1].split()[0]) == 43 - shown


def test_time_that_a_hypervisor_took_is_busy_time():
    """The columns of /proc/stat are user, nice, system, idle, iowait, irq, softirq, steal and guest, see proc(5).

    The column steal is the time that a hypervisor took.
    """
    assert host.parse_processor_ticks(b"cpu  10 1 5 70 4 2 3 5 9 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n") == [(26, 100), (6, 8)]


@pytest.mark.parametrize(("text", "value"), [("1.5 billion", 1.5e9), ("2 million", 2e6), ("7 thousand", 7e3)])
def test_a_printed_number_word_such_as_million_is_parsed_exactly(text, value):
    assert printed_number.parse_number(text, None, "parameters").value == value
