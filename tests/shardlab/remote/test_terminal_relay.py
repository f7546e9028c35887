"""shardlab shows the output of a command on another machine on this terminal. The tables of the command are drawn; other
control sequences are removed."""

import itertools
import os
import re
import subprocess
import sys

import pytest
import support_collect as support
from hypothesis import given
from hypothesis import strategies as st
from support_e2e import HANG_S
from support_hostile import STEERING, on_terminal, steering

from shardlab.remote.terminal_relay import TerminalFilter
from shardlab.workspace.workspace import Workspace

DRAWN = "\n\n\n\x1b[1;31mred\x1b[0m \x1b[?25l\x1b[2K\x1b[3A\r\x1b[?25hend\n"


def passed(parts, drawing=True):
    passing = TerminalFilter(keeps_drawing=drawing)
    return "".join([*(passing.filter_part(part) for part in parts), passing.filter_part(b"", is_last=True)])


def test_sequences_of_rich_pass_to_a_terminal_and_not_to_a_file():
    assert passed([DRAWN.encode()]) == DRAWN
    assert steering(passed([DRAWN.encode()], drawing=False)) == []


@given(st.lists(st.integers(0, len(DRAWN)), max_size=6))
def test_a_sequence_passes_wherever_the_parts_are_cut(places):
    cuts = [0, *sorted(places), len(DRAWN)]
    assert passed([DRAWN[begin:end].encode() for begin, end in itertools.pairwise(cuts)]) == DRAWN


PARTS = ["\x1b[A", "\x1b[0A", "\x1b[1A", "\x1b[7A", "\x1b[99999999999999999999A", "\n", "\r\n", "\v", "a", "\x1b[2K", "\r"]


@given(st.lists(st.sampled_from(PARTS), max_size=30))
def test_the_cursor_never_moves_above_the_first_line_of_the_command(parts):
    line = 0
    for moved in re.finditer(r"\x1b\[([0-9]*)A|\n", passed([part.encode() for part in parts])):
        line += 1 if moved[0] == "\n" else -(int(moved[1] or 1) or 1)
        assert line >= 0, "a line that the command did not write could be changed"


def test_a_table_is_drawn_again_over_itself_and_only_on_one_stream():
    table = "a\nb\nc\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2K"
    assert passed([(table * 3).encode()]) == table * 3
    there = "import sys; print('out', flush=True); print('\\n\\n\\x1b[2Aerr', file=sys.stderr)"
    run = f"terminal_relay.relay_command([sys.executable, '-c', {there!r}], uses_terminal=True, start_mark='')"
    assert "\x1b[2A" not in on_terminal(["-c", f"import sys; from shardlab.remote import terminal_relay; {run}"])


@pytest.mark.parametrize(
    "other", ["\x1b]0;owned\x07", "\x1b]52;c;b3duZWQ=\x1b\\", "\x1b[2J", "\x1b[1;1H", "\x1b[6n", "\x1bc", "\x9b2J", "\u202e"]
)
def test_no_other_sequence_passes(other):
    for parts in ([other.encode()], [bytes([byte]) for byte in other.encode()]):
        assert steering(passed(parts)) == []


@given(st.lists(st.binary(max_size=30)))
def test_no_terminal_sequence_passes_to_a_file(parts):
    assert steering(passed(parts, drawing=False)) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_both_outputs_and_the_exit_code_pass(terminal):
    there = f"import sys; print({STEERING + 'out'!r}); print({STEERING + 'err'!r}, file=sys.stderr); sys.exit(7)"
    run = f"terminal_relay.relay_command([sys.executable, '-c', {there!r}], uses_terminal={terminal}, start_mark='')[0]"
    code = f"import sys; from shardlab.remote import terminal_relay; print('code', {run})"
    said = on_terminal(["-c", code])
    assert ":smile:out" in said
    assert ":smile:err" in said
    assert said.endswith("code 7\n")
    assert steering(said, allowed="\n\r") == []


def test_a_list_that_a_script_reads_is_no_input_of_the_command():
    code = (
        "from shardlab.remote import terminal_relay; terminal_relay.relay_command(['cat'], uses_terminal=False, start_mark='')"
    )
    loop = 'while read line; do "$0" -c "$1"; echo "line $line"; done'
    argv = ["bash", "-c", loop, sys.executable, code]
    done = subprocess.run(argv, input=b"a\nb\n", capture_output=True, timeout=HANG_S, check=True)
    assert done.stdout == b"line a\nline b\n"


def test_a_leftover_background_process_does_not_block_the_relay():
    words = ["sh", "-c", "sleep 600 & echo $!"]
    code = "import sys; from shardlab.remote import terminal_relay\n"
    code += f"print('code', terminal_relay.relay_command({words!r}, uses_terminal=False, start_mark='')[0])"
    said = on_terminal(["-c", code]).split()
    assert said[1:] == ["code", "0"]
    os.kill(int(said[0]), 9)


# A stand-in for `ssh`: prints control sequences, and then runs the command, which is its last argument, on a new terminal.
SSH = f"""#!{sys.executable}
import os, pty, sys
os.write(1, {STEERING.encode()!r})
sys.exit(os.waitstatus_to_exitcode(pty.spawn(["sh", "-c", sys.argv[-1]])))
"""


def test_a_live_table_of_another_machine_is_drawn_here(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    workspace = Workspace(tmp_path / "there")
    support.failed(workspace, support.cell(), 1, STEERING)
    code = (
        "from shardlab.remote.remote_workspace import RemoteWorkspace\n"
        f"python, workspace = {sys.executable!r}, {str(workspace.path)!r}\n"
        "there = RemoteWorkspace(1, 'far', '10.9.9.1', 22, 'alice', None, '/k', 'strict', python, workspace, 'm')\n"
        "assert there.run_interactively('jobs', ['status', '--watch']) == 0"
    )
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    said = on_terminal(["-c", code], PATH=path)
    assert "1 run(s): 1 failed" in said
    assert "\x1b[?25l" in said, "the table is a live one"
    assert "evil" in said
    assert passed([said.encode()]) == said, "nothing else steers"
